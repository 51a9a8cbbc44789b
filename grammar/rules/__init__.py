"""Grammars as rules over characters, which every constraint becomes; readers of regexes and of GBNF.

A grammar is a dictionary of expressions (`expression`) by rule name, and begins with the rule ``root``
(`rule_set`). ``root ::= "a" root "b" | [0-9]+`` is

    {"root": alt(seq(text("a"), Call("root"), text("b")), repeat(chars([(0x30, 0x39)]), 1, None))}

`regex_syntax` and `gbnf` read their notations into such expressions. `left_recursion` rewrites rules that
begin with themselves. `derivative` makes automata of expressions, to intersect or complement sets of texts.
"""
