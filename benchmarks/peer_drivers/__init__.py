"""Drivers of peers: a file for each, run as `DRIVER '{"model": …}'` by the Python (or Node.js) that has the
peer.

The argument is an object with `model` (a GGUF file), `threads`, `context` (tokens of the longest request),
`requests` (the most at once) and `speculation` (for Ramify alone). The driver prints {"peer": {}} when it is
ready. Each line of its standard input is then {"prompts": token ids of each, "output": N}. For each prompt
the driver generates N tokens greedily, and then it prints {"peer": {"outputs": tokens generated for each}}.
The other side is `benchmarks.peers`.
"""
