"""Models: from files to tensors, and the forward pass.

- `shape/`: the sizes that a `config.json` gives. `checkpoint`: a model's files on this machine. `hub/`: files
  on the Hugging Face hub.
- Forward pass: `causal_lm` is the protocol that the executor runs; attention is passed in. `decoder` is a
  model of our own families without its layers. `families/` has the layers, `layers` and `experts` the modules
  that layers are made of, `rope` the rotary embedding. `pooling` turns hidden states into embeddings.
- Weights: `weights` fills a model with tensors, which `gguf/` and `quantised` read from other formats.
  `quantization` and `packed_cache` lay matrices out for the CPU's kernels. `loading/` builds a model from its
  files with all of these modules.
- `lora/`: adapters, by name.
- `transformers/`: models of other families, run by their code in the transformers library.
- `tokenizer/`: tokenizers and chat templates.

`ramify.runtime.inspect.resolve` finds the files of a model by its name.
"""
