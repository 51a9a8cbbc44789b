"""The radix cache: a prefix tree over KV pages, with sharing exact to the token at every page size.

cache.py       the interface: match, acquire, allocate, commit, release, lease; who owns which page
lock.py        what the cache hands out: a match, a lock, a page table
tree.py        the shape of the tree: match, split, append, join; node.py one node, key.py tokens as bytes
pages.py       the pool of page numbers
usage.py       which tree pages are in use, leased or evictable; stats.py the counts
eviction.py    the queue of evictable leaves; lease.py prefixes kept for programs that come back
states.py      slots of recurrent states at the ends of nodes, for models with linear attention layers
integrity.py   conservation checks for tests
observe/       digests of prefixes, recent evictions, a sample for dashboards, what entered and left
naive.py       the same interface without sharing; token_tree.py counts distinct tokens of sequences
"""
