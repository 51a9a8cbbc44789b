"""Grammar rules for the values of each JSON type, made from the disjuncts of a schema.

schema_grammar  the grammar under construction, to which all other modules add rules
scalars         numbers (`number_text`, `decimal_language`) and strings (`string_language`)
arrays          arrays, also those whose items must differ
objects         objects; `object_members` writes the members between the braces
json_text       the spelling of strings; `json_rules` has punctuation, and the rules for any value
"""
