"""Schemas as logic: keywords become formulas of assertions, which are put into disjunctive normal form."""
