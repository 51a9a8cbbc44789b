"""Models from their files: `load` puts one together, `fingerprint` tells it apart from others."""
