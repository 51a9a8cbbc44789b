"""Tokenizers and chat templates: loading, and templates taken apart into pieces."""
