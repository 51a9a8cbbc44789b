"""JSON Schema: checked, turned into grammar rules, and used to check values."""
