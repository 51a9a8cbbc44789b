"""Finds and downloads a model's files by its name."""
