"""The rows that have results, and the rows of the input that were read so far, in 16 bytes a row.

    ids     array of uint64, sorted     the row's identity
    words   array of uint32             28 bits of the row's digest, and its status; 0: no result
    places  array of uint32             the row's place in the input, from 1; 0: not seen

New rows are collected in a dictionary, which is merged into the arrays from time to time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

OK, FAILED, TRANSIENT = 1, 2, 3
"""Statuses of a result: the row succeeded, failed, or failed transiently."""
OUTDATED = 4
"""Bit of a status: the result comes from another program, or from other options."""
STATUS = 0xF
LEAST_NEW = 128
"""Number of new rows that starts a merge into the arrays. For large arrays it is 1/64 of the arrays' rows."""


class FinishedRows:
    def __init__(self, results: Iterable[tuple[int, int]]) -> None:
        """`results`: (identity, word) of each result. Of several results with one identity, the last
        counts."""
        ids, words = array("Q"), array("I")
        for identity, word in results:
            ids.append(identity)
            words.append(word)
        self._new: dict[int, int] = {}
        """Identity → place, of rows that are not merged yet."""
        self._set(_array(ids, np.uint64), _array(words, np.uint32), np.zeros(len(ids), np.uint32))

    def _set(
        self, ids: npt.NDArray[np.uint64], words: npt.NDArray[np.uint32], places: npt.NDArray[np.uint32]
    ) -> None:
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        last = np.append(ids[1:] != ids[:-1], True) if len(ids) else np.zeros(0, bool)
        self._ids, self._words, self._places = ids[last], words[order][last], places[order][last]

    def __len__(self) -> int:
        """Number of rows with results."""
        return int(np.count_nonzero(self._words))

    @property
    def outdated(self) -> int:
        """Number of rows with results of another program, or of other options."""
        return int(np.count_nonzero(self._words & OUTDATED))

    def word(self, identity: int) -> int:
        """The word of a row; 0 if the row has no result."""
        at = self._find(identity)
        return 0 if at is None else int(self._words[at])

    def place(self, identity: int) -> int:
        """The place that was last set for a row; 0 if no place was set."""
        at = self._find(identity)
        return self._new.get(identity, 0) if at is None else int(self._places[at])

    def set_place(self, identity: int, place: int) -> None:
        at = self._find(identity)
        if at is not None:
            self._places[at] = place
            return
        self._new[identity] = place
        if len(self._new) >= max(LEAST_NEW, len(self._ids) // 64):
            self._merge()

    def count(self, *, seen: bool) -> int:
        """Number of rows that have results and were seen in the input; if `seen` is False, that have results
        and were not seen."""
        return int(np.count_nonzero((self._words != 0) & ((self._places != 0) == seen)))

    def _find(self, identity: int) -> int | None:
        at = int(np.searchsorted(self._ids, np.uint64(identity)))
        return at if at < len(self._ids) and int(self._ids[at]) == identity else None

    def _merge(self) -> None:
        ids = np.fromiter(self._new.keys(), np.uint64, len(self._new))
        places = np.fromiter(self._new.values(), np.uint32, len(self._new))
        words = np.zeros(len(ids), np.uint32)
        self._new.clear()
        self._set(
            np.concatenate([self._ids, ids]),
            np.concatenate([self._words, words]),
            np.concatenate([self._places, places]),
        )


def last_of_each(ids: array[int]) -> npt.NDArray[np.bool_]:
    """A mask of the last occurrence of each identity in `ids`."""
    found = _array(ids, np.uint64)
    order = np.argsort(found, kind="stable")
    last = np.zeros(len(found), bool)
    if len(found):
        last[order] = np.append(found[order][1:] != found[order][:-1], True)
    return last


def _array(values: array[int], kind: Any) -> npt.NDArray[Any]:
    return np.frombuffer(values, kind) if len(values) else np.zeros(0, kind)
