"""From rules to pushdown automata over bytes, and from a state of the automaton to a token mask.

In the order in which a grammar is compiled:

    compiler       decides which rules are called, and runs the other steps
    nodes          the rules as arrays, and the sets of characters that they tell apart
    construction   what the construction of states works on
    positions      what may be read next in a rule, and what follows it (Glushkov's positions)
    counted        long repetitions as rules that count with the stack
    subset_construction    sets of positions as states over characters, which may call rules
    byte_edges     characters become the bytes of their UTF-8
    pruning        removes dead states, merges equal ones
    costs          the shortest completion from each state
    unique_items   how many unique items there are, and what they cost
    members        objects whose members come in any order: which are left, and what they cost
    runs           where any n characters of a kind may come
    pushdown       the result: `PushdownAutomaton`

Mask filling: `token_trie` walks the `trie` of all tokens against an automaton, with `walk` where it is
deterministic and `nondeterministic_walk` where not; `loops` are the states whose characters need no walk;
`registers` are what a walk knows of the members read. `numba_types` are the types of the arrays in compiled
code; `char_sets` cuts character sets into disjoint ones.

An example: ``root ::= "a" root "b" | "c"`` becomes

    state 0    a → 2    c → 1
    state 1    final
    state 2    a, c: push 3, and read the byte from state 0
    state 3    b → 1

A final state that has no edge for a byte pops the stack, and the state popped reads the byte.
"""

from ramify.machine_code import keep_outside_the_package

keep_outside_the_package()
