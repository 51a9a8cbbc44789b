"""Speculative decoding: draft tokens, and whether they are worth verifying.

drafter       proposes draft tokens, by prompt lookup first
draft_model   passes of a draft model, its KV, and the decision when its passes pay
acceptance    acceptance rates, and the cost of a step by its rows
"""
