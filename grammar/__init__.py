"""Constraints on output: what a JSON schema, a regex or a grammar lets come next, token by token.

    rules       grammars as rules over characters; readers of regexes and of GBNF
    schema      JSON Schema as such rules; checking values against schemas
    automaton   rules as a pushdown automaton over bytes, and the walk of all tokens against it
    engine      matchers: one a request, on a compiled grammar; fills its token masks
    compile     the compiler's process: a constraint in, a compiled grammar as bytes out

`store` is the scheduler's side: it asks the compiler's process for a grammar and keeps what it gets.
`matcher` says what the scheduler may ask of an engine. Imports go one way:

    compile ──▶ schema ──▶ rules ◀── automaton ◀── engine ◀── store

and `compile` may import all of them but `store`.
"""
