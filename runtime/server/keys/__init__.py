"""API keys: who may send which requests, and how many.

- `file`: the file of keys, and new keys.
- `limits`: requests and tokens a minute.
- `tenants`: the keys of a server, what each has in flight, and the form that its requests have in the engine.
"""
