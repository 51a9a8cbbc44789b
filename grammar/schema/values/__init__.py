"""Grammar rules for each JSON type, made of the disjuncts of a schema.

schema_grammar  the grammar under construction, which all of these write into
scalars         numbers (`number_text`, `decimal_language`) and strings (`string_language`)
arrays          arrays; `unique_arrays` where items must differ
objects         objects; `object_members` writes the members between the braces
json_text       the spelling of strings, `punctuation` between values, and `json_rules` of any value
"""
