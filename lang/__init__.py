"""The DSL: programs of many generations become requests to a backend."""
