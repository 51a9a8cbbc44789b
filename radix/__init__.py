"""The prefix tree over KV pages: sharing that is exact to the token at every page size."""
