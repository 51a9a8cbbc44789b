"""What a program runs on: an engine is one by itself, the others are here, with the HTTP that the remote ones share."""
