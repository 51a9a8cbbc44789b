"""Tools, which are functions that a model may call: schemas, descriptions in prompts, and the form of calls
and results."""
