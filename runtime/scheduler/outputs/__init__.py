"""From hidden states to what the detokenizer is told.

next_tokens     choosing tokens; verification: known and draft tokens are kept or not
appending       tokens join the output; output: the message about a step
scoring         choices as a tree behind a prompt; pooling: hidden states become an embedding
"""
