"""Decisions: typed questions about a state, answered by the probabilities of their options.

answers : probabilities, confidence and option mass (definitions: docs/decide-definitions.md)
calibration : temperatures fitted to labelled questions, and their file
checks : wrong questions, refused before any work
layouts : the text of a question and the spellings of its options, by layout
values : names of options that are texts or bools
"""
