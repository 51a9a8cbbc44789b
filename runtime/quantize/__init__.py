"""Writes checkpoints with quantised weights, and measures the loss of quality."""
