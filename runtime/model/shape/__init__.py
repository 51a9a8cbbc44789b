"""The shape of a model: the sizes and options that a `config.json` gives. Imports no torch.

- `config`: the shape itself, and that of linear attention's states.
- `hf_config`, `hf_rope`: read the shape from a `config.json`; `hf_families`: differences between families.
- `quantised_config`: the form of a quantised checkpoint.
- `context`: an engine's context; `shard`: a rank's part of the shape.
"""
