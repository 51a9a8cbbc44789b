"""From rules to pushdown automata over bytes, and from a state of the automaton to a token mask.

    pushdown       the result of compiling: `PushdownAutomaton`, a state machine with a stack
    members        tables of objects whose members come in any order; `registers` record the members read
    characters     kinds of characters that many states read completely
    numba_types    types of the arrays in compiled code
    construction   from rules to automata
    masks          from a state to the tokens that may come next

An example: ``root ::= "a" root "b" | "c"`` becomes

    state 0    a → 2    c → 1
    state 1    final
    state 2    a, c: push 3, and read the byte from state 0
    state 3    b → 1

A final state that has no edge for a byte pops the stack, and the state popped reads the byte.
"""

from ramify.machine_code import keep_outside_the_package

keep_outside_the_package()
