"""Matchers, which follow the output of a request through its compiled grammar and fill its token masks."""
