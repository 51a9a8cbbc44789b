"""The inner loops of products with packed weights."""
