"""Several models in one process."""
