"""Health, metrics, model information and the live page."""
