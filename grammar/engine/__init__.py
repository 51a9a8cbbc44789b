"""Matchers: they follow the output of a request through its compiled grammar, and fill its token masks.

    pushdown         most grammars: a deterministic automaton, masks kept by state
    forking          a text may be read in several ways at once
    fresh            items of arrays must differ
    forking_fresh    both
    lark             grammars in Lark's notation, by llguidance

`prefix_matcher` and `thinking` wrap any of these: a prompt that ends inside a token, and free text before the
constrained text. `load` picks the engine that a compiled grammar is for.
"""
