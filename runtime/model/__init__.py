"""Models: from a name to files, from files to tensors, and the forward pass.

- Names: `hub/` finds a model's files, `checkpoint` and `gguf/` read them. `config` is the model's shape, with
  `state_shape`; `hf_config` and `hf_rope` read it from a `config.json`.
  `context` chooses a length. `fingerprint` tells models apart.
- Weights: `load` puts a model together from `weights` (safetensors) or `gguf/weights`. `quantization` and
  `packed_cache` lay matrices out for the CPU's kernels. `shard` is a rank's part of them.
- Forward pass: `causal_lm` is what the executor runs, attention is passed in. `decoder` is a model of ours
  without its layers, `layers` and `experts` have their parts, `families/` the layers, `rope` the rotary
  embedding. `pooling` says how a model's embeddings are made.
- `lora/`: adapters, by name.
- `transformers/`: models of other families, by their code in transformers.
- `tokenizer/`: tokenizers and chat templates.
"""
