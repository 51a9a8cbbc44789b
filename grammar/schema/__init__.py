"""JSON Schema: checks of schemas, their compilation to grammar rules, and validation of values.

How ``{"type": ["integer", "null"], "minimum": 8}`` becomes rules:

    document.check     the document is a schema; its only subschema has the JSON pointer ""
    logic.keywords     a formula: Types(integer, null) and LowerBound(8)
    logic.normal_form  its disjuncts, here one: types integer and null, assertion LowerBound(8)
    values             each disjunct, type by type, as an expression: null | [8-9] | [1-9] [0-9]+
    compiler           the rules that root needs: root ::= r1, r1 ::= "null" | [8-9] | [1-9] [0-9]+

`instance` is the validator. It follows the specification keyword by keyword, and shares no formulas with the
compiler.
"""
