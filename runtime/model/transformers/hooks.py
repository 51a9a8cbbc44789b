"""The attention and the mask function that transformers' code calls (`AttentionInterface`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "ramify"
"""The value of `attn_implementation` that selects these functions."""


class Hooks(Protocol):
    """The functions that the library's code calls during one forward pass."""

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, options: Any
    ) -> Tensor:
        """Attention of one layer. q: (1, heads, T, dim); k, v: (1, kv_heads, T, dim), rotated.

        mask: what `mask` has returned for this layer, or None.
        Returns (1, T, heads, dim of v).
        """
        ...

    def mask(self, visible: Callable[..., Any], window: int | None, plain: bool) -> Any:
        """A stand-in for the mask of some layers. The library's code passes this stand-in to `attention`.

        visible: function of the tensors (batch, head, query, key): whether the query sees the key.
        window: the size of a sliding window or of a chunk.
        plain: whether `visible` is the library's own mask function, combined with no other.
        """
        ...


_current: ContextVar[Hooks] = ContextVar("hooks")


@contextmanager
def calling(hooks: Hooks) -> Iterator[None]:
    """Context in which the library's code calls `hooks`."""
    token = _current.set(hooks)
    try:
        yield
    finally:
        _current.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    return _current.get().attention(module, query, key, value, attention_mask, scaling, options), None


def _mask(
    *,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> Any:
    return _current.get().mask(mask_function, local_size, allow_is_causal_skip and not use_vmap)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
