"""Schemas as logic: formulas of assertions, one for each keyword, and their disjunctive normal forms."""
