"""JSON Schema: checked, turned into grammar rules, and used to validate values.

How ``{"type": ["integer", "null"], "minimum": 8}`` becomes rules:

    check              it is a schema; its only subschema has the JSON pointer ""
    logic/keywords     a formula: Types(integer, null) and LowerBound(8)
    logic/normal_form  its disjuncts, here one: types integer and null, assertion LowerBound(8)
    compiler           each disjunct, type by type, as an expression: null | [8-9] | [1-9] [0-9]+
    rules.rule_set     the rules that root needs: root ::= r1, r1 ::= "null" | [8-9] | [1-9] [0-9]+

Which file does what:

    logic/formula      assertions and subschemas under "and", "or" and "not"
    logic/assertions   the assertions, such as `Types` and `LowerBound`, and their negations
    logic/simplify     disjunctions with fewer options
    logic/unevaluated  unevaluatedProperties and unevaluatedItems
    values/scalars     numbers and strings; several conditions on one are automata (`decimal_language`,
                       `string_language`, `string_patterns`); `formats` are patterns
    values/arrays      arrays; those with uniqueItems are in `unique_arrays`
    values/objects     objects; `object_members` writes what is between the braces
    values/json_text   how values are spelled, `punctuation` what is between them, `json_rules` any value
    instance           the validator, which follows the specification and not the formulas
    unenforceable      the error for keywords that no grammar enforces
"""
