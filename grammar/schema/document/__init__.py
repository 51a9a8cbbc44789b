"""Schemas as documents: JSON values, the check that a schema is one, and matching strings.

json_values      JSON texts as values, their types and their equality
check            `SchemaDocument`: a checked schema, its subschemas by JSON pointer, and its references
string_patterns  patterns, matched against strings or as expressions; `formats` are patterns
time_limit       processor time that validating may take; `deep_recursion`: levels of nesting
unenforceable    the error for keywords that no grammar enforces
"""
