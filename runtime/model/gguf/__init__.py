"""GGUF files: header, configuration, tokenizer, and weights by block type."""
