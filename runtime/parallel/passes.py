"""A forward pass as a message from the first rank to the others: msgpack with the arrays' bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ramify.messages import Message
from ramify.runtime.executor.batch import ForwardBatch


class Pass(Message, frozen=True, kw_only=True):
    """A `ForwardBatch`, whose arrays are sent as their bytes.

    tokens : (3, T) int64; page_table : (B, width) int32; query_starts : (B + 1,) int32; kv_lens : (B,) int32
    ahead : the ids are on the first rank's device alone, and follow through the group
    """

    tokens: bytes
    page_table: bytes
    query_starts: bytes
    kv_lens: bytes
    copies: list[tuple[int, int]]
    ahead: bool


def pass_of(batch: ForwardBatch) -> Pass:
    """Raises `ValueError` for a batch with states or adapters, which no rank runs."""
    if batch.states is not None or batch.lora is not None:
        raise ValueError("a pass of several ranks has neither states nor adapters")
    return Pass(
        tokens=_bytes(batch.tokens),
        page_table=_bytes(batch.page_table),
        query_starts=_bytes(batch.query_starts),
        kv_lens=_bytes(batch.kv_lens),
        copies=batch.copies,
        ahead=batch.next_ids is not None,
    )


def batch_of(message: Pass, next_ids: Tensor | None) -> ForwardBatch:
    """The batch of `message`; `next_ids` are there where it is `ahead`."""
    kv_lens = _tensor(message.kv_lens, np.int32)
    return ForwardBatch(
        tokens=_tensor(message.tokens, np.int64).view(3, -1),
        page_table=_tensor(message.page_table, np.int32).view(len(kv_lens), -1),
        query_starts=_tensor(message.query_starts, np.int32),
        kv_lens=kv_lens,
        copies=message.copies,
        next_ids=next_ids,
    )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _tensor(data: bytes, dtype: type[np.integer]) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype))
