"""Grammars as rules over characters, which every constraint becomes; parsers of regexes and of GBNF.

A grammar is a dictionary from rule names to expressions, with the start rule ``root``. The grammar
``root ::= "a" root "b" | [0-9]+`` is

    {"root": alt(seq(text("a"), Call("root"), text("b")), repeat(chars([(0x30, 0x39)]), 1, None))}

    expression      the expressions, and functions that build and simplify them (`term` caches their hashes)
    rule_set        making rules, dropping useless ones, finding recursion
    regex_syntax    regular expressions into expressions, with the sets of characters in `char_classes`
    gbnf            GBNF grammars into rules; `left_recursion` then removes left recursion
    derivative      automata of expressions, to intersect or complement their languages
    utf8            ranges of characters as ranges of bytes
"""
