"""Models: from a name to files, from files to tensors, and the forward pass.

- Names: `hub/` finds a model's files, `checkpoint` and `gguf/` read them. `config` is the model's shape.
- Weights: `load` puts a model together from `weights` (safetensors) or `gguf/weights`. `quantization` and
  `packed_cache` lay matrices out for the CPU's kernels.
- Forward pass: `decoder` is the model without its layers, `layers` has their parts, `families/` the layers,
  `rope` the rotary embedding. Attention is passed in by the executor.
- `tokenizer/`: tokenizers and chat templates.
"""
