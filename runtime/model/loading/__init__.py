"""Models from their files: `load` builds a model, `fingerprint` gives a digest that tells models apart."""
