"""The rules of each JSON type: what the disjuncts of a schema become.

    scalars     numbers (`decimal_language`); strings (`string_language`, `string_patterns`, `formats`)
    arrays      `unique_arrays` where items must differ
    objects     `object_members`: what is between the braces

`json_text` says how values are spelled, `json_rules` has the rules of any value, and `punctuation` what
stands between values.
"""
