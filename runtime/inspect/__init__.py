"""What a model needs and what this machine has, without loading weights."""
