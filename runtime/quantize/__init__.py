"""Writes checkpoints with quantised weights, and measures what that costs."""
