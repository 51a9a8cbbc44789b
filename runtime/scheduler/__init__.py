"""The scheduler process: batches the requests of all clients, step by step.

scheduler     schedule, run, postprocess: open this first
request       one request: its tokens by length, its pages, its statistics
arrival       a submitted message becomes a request; its grammar is compiled
lifecycle     compiling, waiting, running, ended, and the ways between them
admission     which waiting requests join; policy: in which order; precedence: who takes part in a step
pages         the KV pages of requests, from and to the prefix tree; transfers: to and from other replicas
chunk_size    prompt tokens of a step, by the time between tokens
forward       one forward pass; overlap: the next one, launched ahead
next_tokens   choosing tokens; verification: known and draft tokens are kept or not
appending     tokens join the output; output: what the detokenizer is told
scoring       choices as a tree behind a prompt; pooling: hidden states become an embedding
control       programs, cache, statistics; snapshot: for people to look at; tree_teller: for placement
limits, counters, process
"""
