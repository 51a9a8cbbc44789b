"""What is told of the tree, to people, to programs and to those who choose between several trees.

digest.py      64 bits for a prefix
evicted.py     recent evictions, to explain cache misses
prefixes.py    the prefixes that would be missed most
snapshot.py    a sample of the tree for dashboards
tree_log.py    what entered and left the tree, as digests of page ends, and as pages with their tokens
"""
