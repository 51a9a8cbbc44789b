"""Grammars as rules over characters, into which constraints are compiled; parsers of regexes and GBNF.

A grammar is a dictionary from rule names to expressions, with the start rule ``root``. The grammar
``root ::= "a" root "b" | [0-9]+`` is

    {"root": alt(seq(text("a"), Call("root"), text("b")), repeat(chars([(0x30, 0x39)]), 1, None))}
"""
