"""The scheduler process: batches the requests of all clients, step by step.

scheduler     the parts of a scheduler, and its step: open this first
plan          the plan of a step: the requests that take part, and their tokens; admission: requests that join
forward       one forward pass, the token masks filled meanwhile, and the pass launched ahead
results       the hidden states of a step become tokens, scores, embeddings; draft tokens are verified
path_scores   scores of questions from the hidden states of their branches
outputs       tokens join the output, and the message to the detokenizer
lifecycle     a submitted message becomes a request; the states of requests (compiling, waiting, running,
              ended) and the moves between them
grammars      compiled grammars, and the compiler's process
control       programs, cache, statistics, snapshots; transfers: pages from and to other replicas
residency     the memory of pages, which follows their use
process       the process: loading, and the loop
speculation/  draft tokens by prompt lookup and by a draft model
requests/     requests, their pages, programs, flows and limits

Layers, lowest first: requests; speculation; the modules of this folder.
"""
