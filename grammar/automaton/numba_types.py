"""numba's types for the packed arrays: one-dimensional and contiguous."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numba
import numpy as np

BYTES = numba.types.Array(numba.uint8, 1, "C", readonly=True)
INTS = numba.types.Array(numba.int32, 1, "C", readonly=True)
BOOLS = numba.types.Array(numba.boolean, 1, "C", readonly=True)


def array_dtypes(
    kind: Any, *, uint8: Iterable[str] = (), flags: Iterable[str] = ()
) -> dict[str, np.dtype[Any]]:
    """By field of the named tuple `kind`: the fields in `uint8`, bool for `flags`, int32 for all others."""
    dtypes: dict[str, np.dtype[Any]] = dict.fromkeys(kind._fields, np.dtype(np.int32))
    dtypes |= dict.fromkeys(uint8, np.dtype(np.uint8))
    return dtypes | dict.fromkeys(flags, np.dtype(np.bool_))


def record(*names: str) -> np.dtype[Any]:
    """A record of int32 fields."""
    return np.dtype([(name, np.int32) for name in names])


def tuple_type(kind: Any, dtypes: Mapping[str, np.dtype[Any]], *, readonly: bool = False) -> Any:
    """The type of the named tuple `kind` of arrays; numba tells writeable arrays from read-only ones."""
    types = [
        numba.types.Array(numba.from_dtype(dtypes[name]), 1, "C", readonly=readonly) for name in kind._fields
    ]
    if len(set(types)) == 1:
        return numba.types.NamedUniTuple(types[0], len(types), kind)
    return numba.types.NamedTuple(types, kind)
