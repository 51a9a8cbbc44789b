"""Requests in the scheduler, and their pages, programs, flows and limits.

request       one request and its tokens; parts: its page table, report and statistics
sampling      chooses the next token of a request; constrained: grammar masks, jump-forward, token healing
choices       the choices that a request scores, as a tree
decisions     the questions of a request, their branches and scores; path_tree: the tree of a form's paths
branches      pages and slots of branches
slots         running requests as arrays: page tables and sampling options, by slot
pages         moves KV pages between requests and the prefix tree; leases; states: linear attention states
programs      running programs; flows: fair queueing of groups of requests
limits        limits on requests, and tuned numbers; accounts: counters, and budgets of programs
"""
