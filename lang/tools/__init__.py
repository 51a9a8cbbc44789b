"""Tools, which are functions that a model may call: schemas, descriptions, and the form of calls."""
