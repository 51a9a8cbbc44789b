"""Token counts on the device, so that a step sends only the counts that have changed.

Example: sequence A has the distinct tokens 7 9 4, sequence B has 5 9; now B gets another 9, and its first 8:

    pool, tokens   7 9 4 - 5 9 - -       sent: places 5 6, tokens 9 8, counts 2 1
          counts   0 2 1 - 1 1 - -             and a row, a start and a size for each sequence

Each sequence has a segment of the pool. The edits of logits, 20 bytes for each distinct token, are computed
on the device from the pool. Without the pool the host would compute and send them.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from ramify.kernels.arguments.sampling_inputs import NONE_COUNTED, LogitEdits, RowEdits, TokenCounts
from ramify.kernels.machine.transfers import to_device

LEAST = 64
"""The fewest places of a segment. A new segment has at least twice as many places as its sequence has
distinct tokens."""


@dataclasses.dataclass(slots=True)
class _Segment:
    start: int
    room: int


class DeviceCounts:
    """A pool of token counts on the device, from which the edits of rows are made. The host's counts are
    authoritative: the pool is a copy, and a full pool is rebuilt from the host's counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pool = torch.zeros(2, 0, dtype=torch.int32, device=device)
        self._used = 0
        self._segments: weakref.WeakKeyDictionary[TokenCounts, _Segment | None] = weakref.WeakKeyDictionary()
        """The segment of each `TokenCounts`; None after its first step, as counts used in a single step are
        not worth a segment."""

    def edits(self, rows: Sequence[RowEdits | None]) -> LogitEdits | None:
        """The edits of the rows of logits, as from `LogitEdits.from_rows`, possibly in another order.

        An entry of `rows` is None if that row has no edits. Returns None if all entries are None.
        """
        placed = [(index, row) for index, row in enumerate(rows) if row is not None and self._has(row)]
        held = {index for index, _ in placed}
        others = [None if index in held else row for index, row in enumerate(rows)]
        found = []
        if any(row is not None for row in others):
            found.append(LogitEdits.from_rows([row or RowEdits() for row in others], self._device))
        if placed:
            found.append(self._gathered(placed))
        if not found:
            return None
        if len(found) == 1:
            return found[0]
        return LogitEdits(
            torch.cat([each.places for each in found], dim=1),
            torch.cat([each.amounts for each in found], dim=1),
        )

    def _has(self, row: RowEdits) -> bool:
        """Whether the edits of `row` can be made from the pool: an earlier step had the same `TokenCounts`,
        and the row has no biases and no banned tokens."""
        counts = row.counts
        if counts is NONE_COUNTED or row.logit_bias or row.banned:
            return False
        if counts in self._segments:
            return True
        self._segments[counts] = None
        return False

    def _gathered(self, placed: Sequence[tuple[int, RowEdits]]) -> LogitEdits:
        self._update([row.counts for _, row in placed])
        starts, sizes = [], []
        for _, row in placed:
            segment = self._segments[row.counts]
            assert segment is not None
            starts.append(segment.start)
            sizes.append(row.counts.arrays.shape[1])
        total = sum(sizes)
        before = np.cumsum([0, *sizes[:-1]])
        lists = np.array([[index for index, _ in placed], np.array(starts) - before, sizes], np.int32)
        options = [(row.repetition_penalty, row.presence_penalty, row.frequency_penalty) for _, row in placed]
        rows, shifts, lengths = to_device(lists, self._device)
        repetition, presence, frequency = to_device(np.array(options, np.float64).T.copy(), self._device)
        of = torch.repeat_interleave(lengths, output_size=total)
        index = torch.arange(total, dtype=torch.int32, device=self._device).add_(shifts[of])
        tokens, counts = self.pool.index_select(1, index)
        # In float64 and rounded once, as on the host.
        amounts = torch.zeros(3, total, dtype=torch.float32, device=self._device)
        amounts[0] = repetition[of]
        amounts[1] = (frequency[of] * counts).add_(presence[of]).mul_(counts > 0)
        return LogitEdits(torch.stack([rows[of], tokens]), amounts)

    def _update(self, counts: Sequence[TokenCounts]) -> None:
        """Bring the segments of `counts` up to date, by one copy to the device."""
        full = [each for each in counts if self._room(each) < each.arrays.shape[1]]
        if full and not self._assign(full):
            self._renew(counts)
            return
        places, arrays = [], []
        whole = set(map(id, full))
        for each in counts:
            segment = self._segments[each]
            assert segment is not None
            changed = each.take_changes()
            if id(each) in whole:  # its segment is new
                changed = range(each.arrays.shape[1])
            if changed:
                columns = np.fromiter(changed, np.int32, len(changed))
                places.append(columns + segment.start)
                arrays.append(each.arrays[:, columns])
        if places:
            sent = np.concatenate([np.concatenate(places)[None], np.concatenate(arrays, axis=1)])
            on_device = to_device(sent, self._device)
            self.pool[:, on_device[0].long()] = on_device[1:]

    def _room(self, counts: TokenCounts) -> int:
        """The number of places of the segment of `counts`; -1 if it has no segment, so that even counts of no
        tokens get a segment."""
        segment = self._segments[counts]
        return -1 if segment is None else segment.room

    def _assign(self, counts: Sequence[TokenCounts]) -> bool:
        """Give each of `counts` a new segment. Returns False if the pool has too little room for all of
        them."""
        for each in counts:
            room = max(LEAST, 2 * each.arrays.shape[1])
            if self._used + room > self.pool.shape[1]:
                return False
            self._segments[each] = _Segment(self._used, room)
            self._used += room
        return True

    def _renew(self, counts: Sequence[TokenCounts]) -> None:
        """Replace the pool by a pool of twice the size that all segments need, new ones for `counts`
        included. The new pool is filled on the host and copied to the device."""
        held = [each for each, segment in self._segments.items() if segment is not None]
        held += [each for each in counts if self._segments[each] is None]
        room = sum(max(LEAST, 2 * each.arrays.shape[1]) for each in held)
        pool = np.zeros((2, 2 * room), np.int32)
        self._used = 0
        for each in held:
            each.take_changes()
            size = each.arrays.shape[1]
            self._segments[each] = _Segment(self._used, max(LEAST, 2 * size))
            pool[:, self._used : self._used + size] = each.arrays
            self._used += max(LEAST, 2 * size)
        self.pool = to_device(pool, self._device)
