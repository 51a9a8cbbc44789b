"""Grammar rules for the values of each JSON type, made from the disjuncts of a schema."""
