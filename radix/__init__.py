"""The radix cache: a prefix tree over KV pages, with sharing exact to the token at every page size.

cache.py       the interface: match, acquire, allocate, commit, release, lease; who owns which page; the
               same interface without sharing
lock.py        values that the cache returns: a match, a lock, a page table, counts
tree.py        the shape of the tree: match, split, append, join; a trie that counts distinct tokens;
               node.py one node, key.py tokens as bytes
eviction.py    tree pages in use, leased or evictable, and the queue of evictable leaves
lease.py       prefixes kept for programs that come back
states.py      slots of recurrent states at the ends of nodes, for models with linear attention layers
integrity.py   conservation checks for tests
digest.py      64-bit digests of prefixes; tree_log.py: pages that entered or left the tree, by digest
cold.py        the index of a cold store: pages outside of the pool, by digest and tokens
evicted.py     recent evictions, to explain cache misses
views.py       a sample of the tree for dashboards, and the prefixes that are most worth keeping
"""
