"""The engine in a user's script, and the answer of one generation."""
