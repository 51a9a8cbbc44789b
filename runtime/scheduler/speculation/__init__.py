"""Speculative decoding by prompt lookup: draft tokens, and whether they are worth verifying."""
