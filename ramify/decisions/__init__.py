"""Decisions: typed questions about a state, answered by the probabilities of their options.

answers : probabilities, confidence and option mass (definitions: docs/decide-definitions.md)
calibration : temperatures fitted to labelled questions, and their file
checks : wrong questions, refused before any work
layouts : the text of a question and the spellings of its options, by layout
trained : checkpoints with a layout of their own, `decider` and `logit_score`, and others, which are refused
values : names of options that are texts or bools
"""
