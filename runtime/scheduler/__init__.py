"""The scheduler process: batches the requests of all clients, step by step.

scheduler     schedule, run, postprocess: open this first
request       one request: its tokens by length, its pages, its statistics
arrival       a submitted message becomes a request; its grammar is compiled
lifecycle     compiling, waiting, running, ended, and the ways between them
admission/    who takes part in a step, and with how many tokens
pages         the KV pages of requests, from and to the prefix tree; transfers: to and from other replicas
states        the states of models with linear attention layers
forward       one forward pass; overlap: the next one, launched ahead
outputs/      choosing and verifying tokens, scores, embeddings, and what the detokenizer is told
control       programs, cache, statistics; snapshot: for people to look at; tree_teller: for placement
constraints/  grammars, masks, healing; programs/: leases and budgets; speculation/: draft tokens
limits, counters, process
"""
