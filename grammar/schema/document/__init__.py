"""Schemas as documents: JSON values, the check that a document is a schema, and matching of strings."""
