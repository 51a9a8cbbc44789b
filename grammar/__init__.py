"""Constraints on output: what a JSON schema, a regex or a grammar allows next, token by token.

    rules        grammars as rules over characters; readers of regexes and of GBNF
    schema       JSON Schema as such rules; checking values against schemas
    automaton    rules as a pushdown automaton over bytes, and the walk over all tokens that fills a mask
    engine       matchers: one for each request, on a compiled grammar; they fill its token masks
    compile      a constraint in, a compiled grammar as bytes out; the processes that do it
    matcher      the interface of an engine for the scheduler, and helpers for masks
    vocabulary   the bytes of every token, the only part of a tokenizer that the engines need
    retokenize   forced text as tokens, tokenized as the model's tokenizer would

Imports go one way, and only `compile` may import all the others:

    compile ──▶ schema ──▶ rules ◀── automaton ◀── engine

Layers, lowest first: own modules; rules; schema.document; schema.logic; schema.values; schema; automaton;
automaton.masks; automaton.construction; engine; compile.

An example, from a schema to a mask:

    schema       {"type": "array", "items": {"const": 1}, "maxItems": 1}
    rules        root ::= "[" "1"? "]"
    automaton    0: "[" → 1    1: "1" → 2, "]" → 3    2: "]" → 3    3: final
    text         [                                   so the state is 1 and the stack is empty
    mask         of the tokens  [  1  ]  1]  11      the allowed ones are  1  ]  1]
"""
