"""Models from their files."""
