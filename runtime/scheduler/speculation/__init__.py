"""Speculative decoding: draft tokens, and whether they are worth verifying.

drafter       proposes draft tokens, by prompt lookup first
model_drafts  the decision when passes of a draft model or draft head pay
draft_head    a layer that drafts from the model's own hidden states: multi-token prediction, EAGLE-3
draft_model   passes of a draft model, and its KV
checks        the draft model or head of an engine, and refusals
acceptance    acceptance rates, and the cost of a step by its rows
"""
