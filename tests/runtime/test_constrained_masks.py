"""The mask of a constrained output is computed once for a state of its grammar and a budget."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from ramify.runtime.scheduler.forward import MaskFiller
from ramify.runtime.scheduler.requests.constrained import ConstrainedOutput

STOP, VOCAB = 0, 64


class EvenThenEnd:
    """A grammar of any even tokens; after three, only the end is allowed. Counts the masks that it fills."""

    free = False
    completion_tokens = 1

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.filled = 0

    @property
    def complete(self) -> bool:
        return len(self.tokens) >= 3

    def accept(self, token: int) -> bool:
        self.tokens.append(token)
        return True

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        self.filled += 1
        row[:] = 1 if self.complete else 0x55555554
        if self.complete:
            row[1:] = 0
        return True


def test_one_mask_for_a_state_and_a_budget() -> None:
    matcher = EvenThenEnd()
    output = ConstrainedOutput(matcher, VOCAB, [STOP], None)  # type: ignore[arg-type]
    output.fill(9)
    assert output.jump([], 1, 9) is None
    assert output.only_end(9) is None
    output.fill(9)
    assert matcher.filled == 1
    output.fill(8)
    assert matcher.filled == 2, "another budget has a mask of its own"
    for count in range(3):
        output.accept(2)
        output.fill(8 - count)
        assert matcher.filled == 3 + count, "and so has another state"
    assert output.mask is not None
    assert output.only_end(6) == STOP
    assert output.jump([2, 2, 2], 1, 6) is None, "the end is no token of a jump"
    assert matcher.filled == 5


class Meeting:
    """A constrained output whose mask is filled once the masks of `others` are being filled too."""

    def __init__(self, others: threading.Barrier | None, threads: list[int]) -> None:
        self._others, self._threads = others, threads

    def fill(self, budget: int, *, may_be_empty: bool) -> None:
        self._threads.append(threading.get_ident())
        if self._others is not None:
            self._others.wait(60.0)


def test_each_thread_fills_the_masks_of_its_grammars() -> None:
    """The first masks of two grammars wait for each other, so they need two threads. All masks of a grammar
    are filled by one thread, even if a thread has nothing left to do."""
    filler, meeting = MaskFiller(2), threading.Barrier(2)
    threads: dict[str, list[int]] = {"long": [], "short": [], "last": []}
    requests: list[Any] = []
    for name, count in (("short", 5), ("long", 9), ("last", 1)):
        grammar = object()
        for place in range(count):
            others = meeting if name != "last" and place == 0 else None
            constrained = Meeting(others, threads[name])
            rid = f"{name} {place}"
            requests.append(
                SimpleNamespace(
                    rid=rid,
                    grammar=grammar,
                    preambles=(),
                    constrained=constrained,
                    healing=None,
                    budget_left=1,
                )
            )
    filler.begin_filling(requests)
    filler.wait()
    assert filler.errors == {}
    assert [len(threads[name]) for name in ("short", "long", "last")] == [5, 9, 1]
    assert [len({*found}) for found in threads.values()] == [1, 1, 1]
    assert {*threads["short"]} == {*threads["last"]} != {*threads["long"]}


def test_one_thread_fills_the_masks_of_grammars_behind_preambles() -> None:
    """Requests of one grammar, of which one thinks first, and a request of another grammar that thinks."""
    filler, threads = MaskFiller(2), []  # type: ignore[var-annotated]
    one, other, preamble = object(), object(), object()
    kinds: list[Any] = [(one, ()), (one, (preamble,)), (other, (preamble,))] * 8
    requests: list[Any] = [
        SimpleNamespace(rid=str(place), grammar=grammar, preambles=before, healing=None, budget_left=1)
        for place, (grammar, before) in enumerate(kinds)
    ]
    for request in requests:
        request.constrained = Meeting(None, threads)
    filler.begin_filling(requests)
    filler.wait()
    assert len(threads) == 24
    assert len({*threads}) == 1
