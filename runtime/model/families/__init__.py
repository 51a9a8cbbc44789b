"""One file a model family: what differs from Llama."""
