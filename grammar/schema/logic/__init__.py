"""JSON Schema as logic: keywords become assertions, combined by and/or/not, in disjunctive normal form."""
