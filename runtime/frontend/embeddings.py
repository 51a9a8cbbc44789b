"""Embeddings: the pooling of a request, and the vector made from the pooled hidden states."""

from __future__ import annotations

from typing import get_args

import numpy as np

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import Pooling
from ramify.model_info import ModelInfo


def pooling_for(info: ModelInfo, asked: str | None) -> Pooling:
    """The pooling named by `asked`; if that is None, the model's own.

    Raises `InvalidRequest` if `asked` is no pooling, and `UnsupportedField` if `asked` is None and the
    model's own pooling is not supported.
    """
    served: tuple[Pooling, ...] = get_args(Pooling)
    for pooling in served:
        if pooling == (info.pooling if asked is None else asked):
            return pooling
    names = " or ".join(map(repr, served))
    if asked is not None:
        raise InvalidRequest(f"pooling is {asked!r}; it must be {names}.", field="pooling")
    raise UnsupportedField(
        f"{info.name} embeds texts with {info.pooling!r}, which is not supported.",
        field="model",
        remedy=f"Name the pooling: {names}.",
    )


def vector_of(pooled: bytes, dimensions: int | None, *, normalize: bool) -> np.ndarray:
    """The embedding made from the bytes of a pooled hidden state (`TextChunk.embedding`): (dimensions,)
    float32.

    If `dimensions` is given, only the first `dimensions` entries are kept (Kusupati et al. 2022, "Matryoshka
    Representation Learning"). With `normalize` it is then divided by its Euclidean length. Raises
    `InvalidRequest` if the vector has fewer than `dimensions` entries.
    """
    vector = np.frombuffer(pooled, "<f4").astype(np.float32)
    if dimensions is not None:
        if not 0 < dimensions <= len(vector):
            raise InvalidRequest(
                f"dimensions is {dimensions}; this model's embeddings have {len(vector)}.",
                field="dimensions",
                remedy=f"Ask for 1 to {len(vector)}.",
            )
        vector = vector[:dimensions]
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector / np.float32(length) if normalize and length > 0 else vector
