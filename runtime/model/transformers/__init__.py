"""Models whose code is in the `transformers` library, on our KV pages.

- `hooks` registers the attention and the mask function that the library's code calls.
- `trace` runs a model's code on the meta device, without weights. It finds what the attention needs, and
  refuses what KV pages cannot hold.
- `backend` is the model with weights.
"""
