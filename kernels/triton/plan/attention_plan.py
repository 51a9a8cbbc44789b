"""The plan of a batch, made on the host once a step: tasks become work items and merges.

A task is a range of query tokens and the range of positions that they attend to. Without a cascade a sequence
is one task; with a cascade it is several. A task is cut along its rows into tiles and, where that fills the
device better, along its positions into parts (split KV). If all positions of a token are in one part, that
part writes the token's output. Otherwise each part leaves a softmax state, and the states are merged.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ramify.kernels.triton.plan.attention_config import CHUNK, GRAIN, Device, Tile

Ints = NDArray[np.int64]

EVERY_POSITION = 1 << 30
"""The position given to queries that see the whole range of their task."""
PROGRAMS_A_PROCESSOR = 2
"""The assumed programs at once on a multiprocessor. Small tiles allow more, the largest allow one."""
STATE_BYTES = 256 << 20
"""The most bytes of a plan's softmax states, which limits how short its parts may be."""
_SMALLEST = 256
"""Positions of the shortest part. Starting such a part and handling its states are assumed to cost a quarter
of its time."""
_MERGE = 256
"""The cost of the merge's launch, in positions. Not measured: see docs/kernels.md."""


class Shape(NamedTuple):
    """The properties of a model and a device that a plan depends on.

    element_size : bytes of a number of the pages
    window : positions each query sees, 0 for all
    deterministic : bits do not depend on the batch
    tiles : in ascending order of rows
    """

    heads: int
    kv_heads: int
    head_dim: int
    element_size: int
    page_size: int
    window: int
    deterministic: bool
    tiles: tuple[Tile, ...]
    device: Device


class Tasks(NamedTuple):
    """Tasks as columns of equal length.

    first, tokens : the task's query tokens, [first, first + tokens)
    listed : bool; whether `first` counts in the list of listed tokens, not in the batch
    position : position of the first query token in its sequence; `EVERY_POSITION` if all queries see all keys
        of [begin, end)
    table : row of the page table to read
    begin, end : positions of the keys to read, [begin, end); `begin` is a multiple of GRAIN, or of CHUNK in a
        deterministic plan
    """

    first: Ints
    tokens: Ints
    position: Ints
    table: Ints
    begin: Ints
    end: Ints
    listed: NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch: `items` (n, ITEM_FIELDS) int32, in descending order of length."""

    tile: Tile
    listed: bool
    items: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Merge:
    """Arguments of `merge.merge_states`, int32."""

    tokens: torch.Tensor
    starts: torch.Tensor
    index: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of one batch, for all layers of one step.

    tokens : (N,) int32, the tokens of listed items
    state_rows : rows of softmax states that the launches leave for the merge
    merge : None if no token has two parts
    space : float32, for the states; None: each run allocates its own
    """

    shape: Shape
    launches: tuple[Launch, ...]
    tokens: torch.Tensor
    state_rows: int
    merge: Merge | None
    space: torch.Tensor | None = None


class _Tiles(NamedTuple):
    """Tasks cut along their rows, as columns of equal length, in the order of tasks."""

    task: Ints
    row: Ints
    rows: Ints
    size: Ints
    begin: Ints
    end: Ints


def make_plan(tasks: Tasks, listed_tokens: Ints, shape: Shape, device: torch.device) -> Plan:
    """The plan of `tasks`; its tensors are on `device`, copied there in one piece."""
    group = shape.heads // shape.kv_heads
    cut = _cut_rows(tasks, group, shape)
    unit = _part_lengths(tasks, cut, group, shape)
    tokens, owner, place = _tokens(tasks, listed_tokens)
    slots, state_rows = _state_rows(tasks, unit, tokens, owner, group, shape)
    pieces: list[NDArray[np.int32]] = []
    launches: list[tuple[Tile, bool, int]] = []
    for tile in shape.tiles:
        for listed in (False, True):
            chosen = (cut.size == tile.rows) & (tasks.listed[cut.task] == listed)
            if chosen.any():
                items = _items(_Tiles(*(column[chosen] for column in cut)), tasks, unit, slots, group, shape)
                launches.append((tile, listed, len(items)))
                pieces.append(items.ravel())
    merges = _merges(tasks, unit, slots, tokens, owner, place, group, shape)
    pieces += [column.astype(np.int32) for column in (listed_tokens, *merges)]
    moved = iter(to_device(pieces, device))
    ready = tuple(Launch(tile, listed, next(moved).view(count, -1)) for tile, listed, count in launches)
    listed_on_device, *merge = moved
    return Plan(shape, ready, listed_on_device, state_rows, Merge(*merge) if len(merge[0]) else None)


def to_device(pieces: list[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, by one transfer, each aligned to 16 bytes."""
    room = [-(-len(piece) // 4) * 4 for piece in pieces]
    whole = torch.zeros(sum(room), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = whole.numpy()
    places = np.cumsum([0, *room])
    for piece, place in zip(pieces, places, strict=False):
        flat[place : place + len(piece)] = piece
    on_device = whole.to(device, non_blocking=True)
    return [on_device[place : place + len(piece)] for piece, place in zip(pieces, places, strict=False)]


def ranges(counts: Ints) -> tuple[Ints, Ints]:
    """For ranges of `counts` elements, each element's range and its index in that range. For counts (2, 3)
    these are (0, 0, 1, 1, 1) and (0, 1, 0, 1, 2)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _cut_rows(tasks: Tasks, group: int, shape: Shape) -> _Tiles:
    """Cut each task into tiles of the smallest size that holds all its rows, or of the largest size."""
    total = tasks.tokens * group
    sizes = np.array([tile.rows for tile in shape.tiles])
    size = sizes[np.minimum(np.searchsorted(sizes, total), len(sizes) - 1)]
    columns = np.array([tile.columns for tile in shape.tiles])[np.searchsorted(sizes, size)]
    task, index = ranges(-(-total // size))
    row = index * size[task]
    rows = np.minimum(size[task], total[task] - row)
    last = tasks.position[task] + (row + rows - 1) // group
    begin, end = tasks.begin[task], np.minimum(tasks.end[task], last + 1)
    if shape.window:
        lowest = tasks.position[task] + row // group - shape.window + 1
        begin = np.maximum(begin, lowest // columns[task] * columns[task])
    keep = begin < end
    return _Tiles(*(column[keep] for column in (task, row, rows, size[task], begin, end)))


def _part_lengths(tasks: Tasks, cut: _Tiles, group: int, shape: Shape) -> Ints:
    """The number of positions of a part, for each task: the whole range, or the length of equal parts, near
    the power of two that costs least.

    The cost is all work divided evenly, plus half of the longest item. (The bound of list scheduling adds the
    whole longest item, but is seldom met.) A row of a state is assumed to cost as much as 4 positions.
    """
    span = np.maximum(tasks.end - tasks.begin, 1)
    length = cut.end - cut.begin
    longest = int(length.max(initial=1))
    slots = shape.device.processors * PROGRAMS_A_PROCESSOR
    room = STATE_BYTES // (4 * (shape.head_dim + 2) * shape.kv_heads)
    best = part = max(longest, int(span.max(initial=1)))
    best_cost = length.sum() * shape.kv_heads / slots + longest / 2
    part = _SMALLEST
    while part < longest:
        left = CHUNK if shape.deterministic else part
        split = span > part
        states = (-(-length // left) * cut.size * 4)[split[cut.task]].sum()
        cost = (length.sum() + states) * shape.kv_heads / slots + part / 2 + _MERGE
        fits = (tasks.tokens * group * -(-span // left))[split].sum() <= room
        if fits and cost < best_cost:
            best, best_cost = part, cost
        part *= 2
    grain = CHUNK if shape.deterministic else GRAIN
    even: Ints = -(-span // -(-span // best))
    return np.asarray(-(-even // grain) * grain)


def _tokens(tasks: Tasks, listed_tokens: Ints) -> tuple[Ints, Ints, Ints]:
    """For each token of each task: its row in the batch, its task, and its index in the task."""
    owner, place = ranges(tasks.tokens)
    tokens = tasks.first[owner] + place
    listed = tasks.listed[owner]
    tokens[listed] = listed_tokens[tokens[listed]]
    return tokens, owner, place


def _state_rows(
    tasks: Tasks, unit: Ints, tokens: Ints, owner: Ints, group: int, shape: Shape
) -> tuple[Ints, int]:
    """The first row of each task's states, or -1 if the task's items write the output; and the number of rows
    of all tasks."""
    span = tasks.end - tasks.begin
    parts = -(-span // unit)
    several = np.bincount(tokens)[tokens] > 1 if len(tokens) else np.zeros(0, bool)
    leaves = (parts > 1) | (np.bincount(owner[several], minlength=len(span)) > 0)
    left = -(-span // CHUNK) if shape.deterministic else parts
    rows = np.where(leaves, tasks.tokens * group * left, 0)
    return np.where(leaves, np.cumsum(rows) - rows, -1), int(rows.sum())


def _items(cut: _Tiles, tasks: Tasks, unit: Ints, slots: Ints, group: int, shape: Shape) -> NDArray[np.int32]:
    """(n, ITEM_FIELDS): every part of every tile, the longest first, so that all programs end together."""
    step, base = unit[cut.task], tasks.begin[cut.task]
    low = (cut.begin - base) // step
    tile, index = ranges(-(-(cut.end - base) // step) - low)
    part = low[tile] + index
    task, step, base = cut.task[tile], step[tile], base[tile]
    begin = np.maximum(cut.begin[tile], base + part * step)
    end = np.minimum(cut.end[tile], base + (part + 1) * step)
    stride = tasks.tokens[task] * group
    number = (begin - base) // CHUNK if shape.deterministic else part
    slot = np.where(slots[task] < 0, -1, slots[task] + number * stride)
    items = np.stack(
        [tasks.first[task], cut.row[tile], cut.rows[tile], tasks.position[task], tasks.table[task],
         begin, end, slot, stride],
        axis=1,
    )  # fmt: skip
    return items[np.argsort(begin - end, kind="stable")].astype(np.int32)


def _merges(
    tasks: Tasks, unit: Ints, slots: Ints, tokens: Ints, owner: Ints, place: Ints, group: int, shape: Shape
) -> tuple[Ints, Ints, Ints]:
    """Three arrays: the tokens with states; where each token's states begin in the index; and the index, the
    rows of the states in ascending order of positions."""
    leaves = slots[owner] >= 0
    tokens, owner, place = tokens[leaves], owner[leaves], place[leaves]
    position = tasks.position[owner] + place
    base = tasks.begin[owner]
    step = np.full(len(owner), CHUNK) if shape.deterministic else unit[owner]
    low = np.maximum(position - shape.window + 1 - base, 0) // step if shape.window else np.zeros_like(base)
    high = -(-(np.minimum(tasks.end[owner], position + 1) - base) // step)
    which, index = ranges(np.maximum(high - low, 0))
    part = low[which] + index
    stride = tasks.tokens[owner] * group
    row = (slots[owner] + place * group)[which] + part * stride[which]
    order = np.lexsort((base[which] + part * step[which], tokens[which]))
    merged, starts = np.unique(tokens[which][order], return_index=True)
    return merged, np.append(starts, len(order)), row[order]
