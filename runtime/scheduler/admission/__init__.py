"""Who takes part in a step, and with how many tokens.

admission     which waiting requests join the batch; policy: in which order
flows         which of them share a place, and yield to others
precedence    which requests, running and waiting, take part
chunk_size    prompt tokens of a step, by the time between tokens
"""
