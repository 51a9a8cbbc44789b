"""Ramify on Ray: batches on Ray Data. The tests that need Ray have the marker `ray` and share one cluster."""
