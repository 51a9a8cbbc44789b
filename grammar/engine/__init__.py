"""Matchers: they follow the output of a request through its compiled grammar, and fill its token masks.

load              picks the engine of a compiled grammar
pushdown          grammars that are pushdown automata, their masks, and the matcher for deterministic ones
nondeterministic  the matcher for nondeterministic automata: several configurations at a time
remembering       the matcher for unique items, and for objects whose members come in any order
members           registers of such objects, and the masks that depend on them
configurations    the base class of these three matchers
stack             stacks as linked lists, edges as Python lists
prefix_matcher    wraps any matcher: a prompt that ends inside a token
thinking          wraps any matcher: free text before the constrained text
lark              grammars in Lark's notation, by llguidance
"""
