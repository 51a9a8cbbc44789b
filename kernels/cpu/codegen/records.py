"""Records: how compiled kernels get their arguments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def record(*names: str, floats: Sequence[str] = ()) -> np.dtype:
    """A record of int64 fields (addresses, counts, flags), then the float64 fields `floats`."""
    return np.dtype([(name, np.int64) for name in names] + [(name, np.float64) for name in floats])
