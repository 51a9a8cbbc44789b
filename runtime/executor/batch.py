"""The input of one forward pass: a packed, ragged batch of new tokens without padding, and its
message to other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.kernels.weights.lora import LoraRows
from ramify.messages import Message


class Extension(NamedTuple):
    """The new tokens of one request in one step: positions ``[start, stop)`` of its `ids`.

    `pages[i]` holds positions ``[i * page_size, (i + 1) * page_size)``; together the pages reach to `stop`.
    If `ids` is None, the tokens are in the batch's `next_ids`. `state` is the slot of the request's state,
    for models that have states. `lora` is the slot of the request's LoRA adapter, below 0 without an adapter.
    `first` is the position of ``ids[0]``.
    """

    ids: np.ndarray | None
    start: int
    stop: int
    pages: np.ndarray | Sequence[int]
    state: int | None = None
    lora: int = -1
    first: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardBatch:
    """B requests with T new tokens in all. Everything but `next_ids` is on the host.

    Attributes
    ----------
    tokens : (3, T) int64
        Token ids, their positions, and the slots that their KV is written to (page * page_size + offset).
    page_table : (B, max_pages) int32
        `kv_lens` says where a row ends. The pages behind are valid ones, and are not read.
    query_starts : (B + 1,) int32
    kv_lens : (B,) int32
        Tokens in pages after the step, including the new tokens.
    copies : list of (source, destination)
        Pages to be copied first (copy-on-write).
    next_ids : (T,) int64, optional
        Token ids on the model's device, used instead of those in `tokens`: the host does not have them yet.
    states : (B,) int64, optional
        The slot of each request's state, all distinct. The step reads a slot at the request's first token and
        writes it after its last one. A request whose first token is at position 0 begins from zeros.
    lora : LoraRows, optional
        The LoRA adapters of the tokens; None if no request has an adapter.
    hidden : (T, `CausalLM.hidden_input_width`), optional
        For a draft head: the hidden states of the tokens before, on the model's device.
    """

    tokens: Tensor
    page_table: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    copies: list[tuple[int, int]]
    next_ids: Tensor | None = None
    states: Tensor | None = None
    lora: LoraRows | None = None
    hidden: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        return self.tokens[0]

    @property
    def decoding(self) -> bool:
        """Whether every request has one token."""
        return self.tokens.shape[1] == len(self.kv_lens)


def pack(
    extensions: Sequence[Extension],
    page_size: int,
    copies: Sequence[tuple[int, int]] = (),
    next_ids: Tensor | None = None,
) -> ForwardBatch:
    """The batch of `extensions`, laid out one after the other."""
    _, starts, stops, tables, state_slots, lora_slots, _ = zip(*extensions, strict=True)
    widths = [-(-stop // page_size) for stop in stops]
    page_table = np.zeros((len(extensions), max(widths)), dtype=np.int32)
    for row, (pages, width) in enumerate(zip(tables, widths, strict=True)):
        page_table[row, :width] = pages[:width]
    ids = [
        each[start - first : stop - first] for each, start, stop, *_, first in extensions if each is not None
    ]
    states = [slot for slot in state_slots if slot is not None]
    return pack_columns(
        None if next_ids is not None else np.concatenate(ids),
        np.array(starts, np.int64),
        np.array(stops, np.int64),
        page_table,
        page_size,
        copies=copies,
        next_ids=next_ids,
        states=states,
        loras=np.array(lora_slots),
    )


def pack_columns(
    ids: np.ndarray | None,
    starts: np.ndarray,
    stops: np.ndarray,
    page_table: np.ndarray,
    page_size: int,
    *,
    copies: Sequence[tuple[int, int]] = (),
    next_ids: Tensor | None = None,
    states: Sequence[int] = (),
    loras: np.ndarray | None = None,
) -> ForwardBatch:
    """The batch of the new tokens ``[starts[i], stops[i])`` of B requests, one request after the other.

    ids : (T,), their ids; None if they are in `next_ids`
    page_table : (B, width) int32, as in `ForwardBatch`
    states, loras : (B,), as in `Extension`; `states` is empty for models without states
    """
    query_starts = np.zeros(len(starts) + 1, dtype=np.int32)
    counts = stops - starts
    np.cumsum(counts, out=query_starts[1:])
    total = int(query_starts[-1])
    tokens = np.empty((3, total), dtype=np.int64)
    tokens[0] = 0 if ids is None else ids
    row_of = np.repeat(np.arange(len(starts)), counts)
    np.add(np.arange(total), (starts - query_starts[:-1])[row_of], out=tokens[1])
    page, offset = np.divmod(tokens[1], page_size)
    np.add(page_table[row_of, page].astype(np.int64) * page_size, offset, out=tokens[2])
    return ForwardBatch(
        tokens=torch.from_numpy(tokens),
        page_table=torch.from_numpy(page_table),
        query_starts=torch.from_numpy(query_starts),
        kv_lens=torch.from_numpy(stops.astype(np.int32)),
        copies=list(copies),
        next_ids=next_ids,
        states=torch.tensor(states, dtype=torch.int64) if len(states) else None,
        lora=LoraRows(loras[row_of]) if loras is not None and loras.max() >= 0 else None,
    )


class Pass(Message, frozen=True, kw_only=True):
    """A `ForwardBatch` as the first rank sends it to the others, with its arrays as bytes.

    tokens : (3, T) int64; page_table : (B, width) int32; query_starts : (B + 1,) int32; kv_lens : (B,) int32
    ahead : whether the token ids are on the first rank's device alone; the group then broadcasts the ids
    """

    tokens: bytes
    page_table: bytes
    query_starts: bytes
    kv_lens: bytes
    copies: list[tuple[int, int]]
    ahead: bool


def pass_of(batch: ForwardBatch) -> Pass:
    """`batch` as a message. Raises `ValueError` if it has states or adapters, which several ranks do not
    support."""
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
    """The batch in `message`. `next_ids` must be given if `message.ahead`."""
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
