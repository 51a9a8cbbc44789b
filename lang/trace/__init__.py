"""The tree of calls of a run: the figures of the calls, the reasons for cache misses, and the HTML report."""
