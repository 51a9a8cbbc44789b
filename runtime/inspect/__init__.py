"""Models before their weights are loaded: their files by name, their needs, and the machine's means."""
