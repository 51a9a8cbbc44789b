"""Models before weights load: their files by name, what they need, and what this machine has."""
