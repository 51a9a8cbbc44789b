"""Python types as JSON schemas, and values that are read back from complete or partial JSON."""
