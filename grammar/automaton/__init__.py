"""From rules to pushdown automata over bytes, and the tokens that an automaton's state allows.

In the order in which a grammar is compiled:

    positions     what may be read next in a rule, and what follows that (Glushkov's positions)
    states        sets of positions as states over characters, which may call rules (subset construction)
    byte_edges    characters become the bytes of their UTF-8
    pruning       dead states go, equal ones are joined
    costs         the fewest tokens from each state to the end
    runs, fresh   what else the engines look up by state
    compiler      runs all of this; the result is `pushdown.PushdownAutomaton`

`token_trie` walks all tokens of a vocabulary against an automaton to fill a mask: with `walk` where each text
is read in one way, with `forking_walk` where in several.

An example: ``root ::= "a" root "b" | "c"`` becomes

    state 0    a → 2    c → 1
    state 1    final
    state 2    a, c: push 3, and read the byte from state 0
    state 3    b → 1

A final state that has no edge for a byte pops the stack and lets the state on top of it read the byte.

A text is *fresh* where it must differ from earlier ones (`rules.expression.Fresh`), as the items of an array
with ``uniqueItems`` must. What has been read is no part of the automaton; the engine remembers it.
"""
