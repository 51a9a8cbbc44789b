"""Functions that a model may call: their schemas, their spelling in a prompt, and turns that call them."""
