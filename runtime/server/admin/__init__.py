"""Health, metrics, model and server information, and the dashboard with its recent requests."""
