"""Every operation in plain torch: the contract of all backends, the oracle of their tests, and a fallback.

A docstring here states shapes, dtypes, meaning and errors once; twins in `cpu` and `triton` say what differs.
Every operation raises ValueError, which names the argument whose shape, stride, dtype or value does not fit.
"""
