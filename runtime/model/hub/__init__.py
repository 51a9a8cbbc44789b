"""From the name of a model to files on this machine."""
