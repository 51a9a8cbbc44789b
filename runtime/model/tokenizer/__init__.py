"""Tokenizers: loading, the vocabulary for grammars, and chat templates taken apart into pieces."""
