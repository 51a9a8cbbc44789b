"""JSON Schema: checked, turned into grammar rules, and used to check values.

From ``{"type": ["integer", "null"], "minimum": 8}`` to rules:

    check       is it a schema? Its subschemas are named by JSON pointer
    keywords    what the keywords say, as a formula (`formula`) over facts (`facts`):
                one of the types integer and null, and a number is at least 8
    branches    alternatives without a choice left in them: here one, as numbers and null do not meet
    compiler    each branch as rules over characters: ``null``, or ``[8-9] | [1-9] [0-9]+``

The compiler asks `arrays` (with `unique_arrays`), `objects` (with `object_members`) and `scalars` for the
values of a branch by their type. Below these lie `json_text` (how values are spelled), `json_rules` (any JSON
value) and `punctuation` (what stands between values), and for strings and numbers under several conditions at
once `string_language`, `string_patterns` and `decimal_language`.

`instance` checks a value against a schema, and was written apart from all of the above; `order` writes a
value as the grammar does. What cannot be enforced exactly is an `unenforceable.Unenforceable`.
"""
