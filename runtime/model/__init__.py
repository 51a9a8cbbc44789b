"""Models: from files to tensors, and the forward pass.

- `shape/`: the numbers of a `config.json`; `checkpoint` has its files, `hub/` those on the Hugging Face hub.
- Forward pass: `causal_lm` is what the executor runs, attention is passed in. `decoder` is a model of ours
  without its layers, `layers` and `experts` have their parts, `families/` the layers, `rope` the rotary
  embedding. `pooling` turns hidden states into a model's embeddings.
- Weights: `weights` fills a model with tensors, which `gguf/` and `quantised/` read from other formats.
  `quantization` and `packed_cache` lay matrices out for the CPU's kernels. `loading/` does all of it.
- `lora/`: adapters, by name.
- `transformers/`: models of other families, by their code in transformers.
- `tokenizer/`: tokenizers and chat templates.

`ramify.runtime.inspect.resolve` finds the files of a model by its name.
"""
