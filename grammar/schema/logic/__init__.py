"""Schemas as logic: formulas of assertions, one for each keyword, and their disjunctive normal forms.

formula      assertions and subschemas under "and", "or" and "not"
assertions   the assertions, such as `Types` and `LowerBound`, and their negations
keywords     the formula of each keyword; `unevaluated` has unevaluatedProperties and unevaluatedItems
disjunct     a conjunction of assertions, without a disjunction
normal_form  formulas as lists of disjuncts; `simplify` and `clauses` keep these lists short
"""
