"""Grammars as rules over characters, into which constraints are compiled; parsers of regexes and GBNF.

A grammar is a dictionary from rule names to expressions, with the start rule ``root``. The grammar
``root ::= "a" root "b" | [0-9]+`` is

    {"root": alt(seq(text("a"), Call("root"), text("b")), repeat(chars([(0x30, 0x39)]), 1, None))}

    expression      the expressions, and functions that build and simplify them (`term` caches their hashes)
    rule_set        making rules, dropping useless ones, finding recursion
    regex_syntax    parses regular expressions into expressions; `char_classes` has their sets of characters
    gbnf            parses GBNF grammars into rules, from which `left_recursion` removes left recursion
    derivative      automata of expressions, which intersect or complement languages
    utf8            ranges of characters as ranges of bytes
"""
