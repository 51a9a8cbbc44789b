"""Small traces of programs, their replay, and the tokens that are recomputed when pages are short."""

from __future__ import annotations

import pytest

from tests.runtime.eviction_replay import UNBOUNDED, Optimum, Replay, compare
from tests.runtime.program_traces import generate

pytestmark = pytest.mark.slow


def test_the_books_balance_after_every_event() -> None:
    trace = generate(4, 6.0)
    budget = Optimum(trace, 16).working_set() // 2
    replay = Replay(budget, 16, hints=True)
    replay.run(trace, check=True)
    counts = replay.cache.counts()
    assert counts.evicted > 0
    assert (counts.in_use, counts.leased) == (0, 0)


def test_hints_save_what_lru_computes_again_and_the_optimum_saves_most() -> None:
    row = compare(generate(2, 80.0, 0.7), 0.5, 16)
    assert row.optimum <= row.program <= 0.6 * row.lru, row
    assert compare(generate(2, 20.0, 0.5), 1.5, 16).program == 0, "with pages enough nothing is"


def test_hints_place_states_where_programs_go_on() -> None:
    """With few state slots, hints keep the number of computed tokens of a hybrid model near the least."""
    trace = generate(2, 60.0, 0.5)
    needed, placed, unhinted = (
        Replay(UNBOUNDED, 16, hints, states).run(trace).computed
        for hints, states in ((False, 0), (True, 48), (False, 48))
    )
    assert needed < placed < 1.2 * needed < 1.3 * needed < unhinted
    replay = Replay(700, 16, hints=True, num_states=16)
    replay.run(generate(4, 6.0), check=True)
    counts = replay.cache.state_counts()
    assert counts.in_use == 0
    assert counts.evicted > 0
