"""Each benchmark runs at its smallest size, and its arithmetic is right."""
