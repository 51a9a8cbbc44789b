"""Drivers, a file for each peer, run by the Python (or Node.js) that has it: `DRIVER '{"model": …}'`.

The argument is an object with `model` (a GGUF file), `threads`, `context` (tokens of the longest request),
`requests` (the most at once) and `speculation` (for Ramify alone). The driver prints {"peer": {}} when it is
ready. Each line of its input is then {"prompts": token ids of each, "output": N}: it generates N tokens for
each, greedily, and prints {"peer": {"outputs": tokens generated for each}}. The other side is
`benchmarks.peers`.
"""
