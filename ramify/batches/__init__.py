"""Batch files: OpenAI's ``/v1/files`` and ``/v1/batches``.

- `route`: the endpoints. `upload` reads a form whose file goes to the disk.
- `store`: the private folder with files, batches, and the lines that were computed.
- `lines`: the lines of an input file: checked, grouped by prefix, and each with its result.
- `runner`: computes the lines by the server's own endpoints, and ends a batch.
"""
