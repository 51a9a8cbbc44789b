"""Schemas as documents: JSON values, the check that a document is a schema, and matching of strings.

json_values      parsing of JSON texts, and the types and equality of JSON values
check            `SchemaDocument`: a checked schema, its subschemas by JSON pointer, and its references
string_patterns  patterns, as expressions and matched against strings; `formats` has the patterns of formats
unenforceable    the error for keywords that no grammar enforces
"""
