"""The rules of each JSON type: what the disjuncts of a schema become.

scalars          numbers (`decimal_language`) and strings (`string_language`, `string_patterns`, `formats`)
arrays           `unique_arrays` where items must differ
objects          `object_members`: what is between the braces
json_text        how values are spelled; `json_rules`: any value; `punctuation`: what is between values
"""
