"""Matchers, which follow the output of a request through its compiled grammar and fill its token masks.

load              picks the engine of a compiled grammar
pushdown          grammars that are pushdown automata, their masks, and the matcher for deterministic automata
nondeterministic  the matcher for nondeterministic automata: several configurations at a time
remembering       the matcher for unique items, and for objects whose members come in any order
members           registers of objects whose members come in any order, and the masks that depend on them
configurations    the base class of the matchers in `pushdown`, `nondeterministic` and `remembering`
stack             stacks as linked lists, edges as Python lists
prefix_matcher    wraps any matcher, for a prompt that ends inside a token
thinking          wraps any matcher, for free text before the constrained text
lark              grammars in Lark's notation, by llguidance
"""
