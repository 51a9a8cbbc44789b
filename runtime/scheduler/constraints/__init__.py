"""Constrained requests: their grammars, their matchers, token masks, token healing."""
