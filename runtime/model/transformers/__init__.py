"""Models whose code is in the `transformers` library, on our KV pages.

- `hooks` registers the attention and the mask function that the library's code calls.
- `trace` runs a model's code on the meta device, without weights: what its attention needs, and what pages
  cannot hold.
- `backend` is the model with weights.
"""
