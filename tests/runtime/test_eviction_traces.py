"""Traces of programs, and their replay, and what is recomputed where pages are short, on a small scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.eviction_replay import UNBOUNDED, Optimum, Replay, compare
from tests.runtime.program_traces import KINDS, generate, recorded

pytestmark = pytest.mark.slow


def test_a_trace_is_the_same_every_time_and_has_all_kinds() -> None:
    one, other = generate(1, 30.0), generate(1, 30.0)
    assert [call.start_s for call in one.calls] == [call.start_s for call in other.calls]
    assert {name.rstrip("0123456789") for _, name in one.ends} == set(KINDS)
    assert all(call.end_s >= call.start_s for call in one.calls)


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
    """Tokens that a model with states computes, with few slots for them, by what it is told."""
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


def request(kind: str, prompt: int, distinct: int, at: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": kind,
        "start_s": at,
        "end_s": at + 0.5,
        "prompt_tokens": prompt,
        "distinct_tokens": distinct,
        "completion_tokens": 10,
        "children": [],
        **more,
    }


def test_a_recorded_run_shares_what_it_shared(tmp_path: Path) -> None:
    fork = {"kind": "fork", "name": "fork", "start_s": 2.0, "end_s": 4.0}
    run = {
        "kind": "program",
        "name": "p",
        "start_s": 0.0,
        "end_s": 5.0,
        "children": [
            request("gen", 100, 100, 0.0),
            request("tool", 0, 0, 0.5, name="search"),
            request("gen", 130, 21, 1.0),
            {**fork, "children": [request("gen", 150, 11, 2.0)]},
            {**fork, "children": [request("gen", 150, 11, 2.1)]},
        ],
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(run))
    trace = recorded([path], copies=2, every=3.0, seed=0)
    assert len(trace.calls) == 2 * 4
    first, second, left, right = trace.calls[:4]
    assert np.array_equal(second.prompt[:109], np.concatenate([first.prompt, first.output[:9]]))
    assert np.array_equal(left.prompt[:139], right.prompt[:139])
    assert left.prompt[139] != right.prompt[139]
    assert first.tools == ("search",)
    assert [call.hint.next_use for call in trace.calls[:4] if call.hint] == [
        "tool",
        "unknown",
        "unknown",
        "never",
    ]
    assert trace.calls[4].start_s == 3.0
    replayed = Replay(UNBOUNDED, 4, hints=True).run(trace)
    assert replayed.computed == 2 * (100 + 21 + 11 + 11)
