"""Python types as JSON schemas, and values parsed from complete or partial JSON."""
