"""Health, metrics, model and server information, replicas, and the dashboard with its recent requests."""
