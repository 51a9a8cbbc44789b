"""The tree of calls of a run: its figures, the reasons for cache misses, and the HTML report that shows
it."""
