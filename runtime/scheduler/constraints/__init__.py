"""Constrained requests: their grammars, matchers and token masks, and token healing.

grammars        compiled grammars, compile jobs under way, and the requests that wait for them
compiler_host   starts and restarts the compiler's process
constrained     one request's constrained output: matcher, mask, jump-forward
masks           fills the masks of a step in a thread, beside the forward pass
healing         token healing of prompts that end inside a token
"""
