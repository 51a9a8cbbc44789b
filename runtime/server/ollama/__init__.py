"""Ollama's API: /api/chat, /api/generate, /api/embed, and the descriptions of the served model.

A request is parsed by `messages` and `options` into the structures of `openai.chat`. The output is written by
`writer` as lines of JSON. `models` describes the served model.
"""
