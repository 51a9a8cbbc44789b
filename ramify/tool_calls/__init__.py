"""Tool calls: the formats of models, grammars for them, a streaming parser, and prompts."""
