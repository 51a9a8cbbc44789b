"""Grammars as rules over characters, which every constraint becomes; readers of regexes and of GBNF."""
