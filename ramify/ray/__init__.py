"""Ramify on a Ray cluster: batches on Ray Data. `import ramify.ray` imports no Ray; the first use does."""
