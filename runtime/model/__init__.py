"""Models: from a name to files, from files to tensors, and the forward pass.

- Names: `hub/` finds a model's files, `checkpoint` and `gguf/` read them. `config` is the model's shape.
- Weights: `load` puts a model together from `weights` (safetensors) or `gguf/weights`. `quantization` and
  `packed_cache` lay matrices out for the CPU's kernels.
- Forward pass: `causal_lm` is what the executor runs, attention is passed in. `decoder` is a model of ours
  without its layers, `layers` has their parts, `families/` the layers, `rope` the rotary embedding.
- `lora/`: adapters, by name.
- `transformers/`: models of other families, by their code in transformers.
- `tokenizer/`: tokenizers and chat templates.
"""
