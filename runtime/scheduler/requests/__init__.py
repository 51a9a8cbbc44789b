"""Requests in the scheduler, and what belongs to them.

request       one request: its tokens by length; parts: its pages, report, statistics
sampling      the next token of a request by its options; constrained: by its grammar, and token healing
choices       choices that a request scores, as a tree
pages         KV pages from and to the prefix tree, and leases; states: of linear attention layers
programs      programs that are running; flows: requests that share one place
limits        limits on requests, and tuned numbers; accounts: counters, and budgets of programs
"""
