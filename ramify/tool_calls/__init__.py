"""Tool calls: the formats of models, grammars and a streaming parser for these formats, and prompts."""
