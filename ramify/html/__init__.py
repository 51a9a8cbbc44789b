"""Pages that need nothing else: what the trace, the load test and the live page share."""
