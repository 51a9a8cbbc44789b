"""Several models behind one process: names, memory, and which of them are loaded. No HTTP is in here.

- `names`: models by name, from the command line and from a folder; durations as Ollama writes them.
- `memory`: bytes that a model needs, and bytes that are free.
- `status`: the state of a model, as lists of models show it.
- `pool`: `ModelPool`, which loads a model at its first use and unloads the least recently used one.
"""
