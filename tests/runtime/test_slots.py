"""Running requests as arrays: their slots, and the short way of plain decodes, which changes no output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramify.engine_messages import Submit
from ramify.runtime.scheduler.outputs import OutputAppender
from ramify.runtime.scheduler.requests.limits import Tuning
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.requests.slots import RunningSlots
from ramify.sampling_params import SamplingParams
from tests.runtime.local import LocalScheduler
from tests.runtime.test_overlap import Load, told


def request_of(**options: Any) -> Request:
    submit = Submit(rid="r", ids=(1, 2), sampling=SamplingParams(**options).check())
    return Request(submit, arrival=0.0, max_tokens=4)


def test_a_slot_has_the_options_of_its_request_and_no_page_of_the_one_before() -> None:
    slots = RunningSlots()
    first = slots.take(request_of(temperature=0.5, top_k=7, seed=-3, min_tokens=1))
    slots.add_pages(first, 0, [5, 6])
    slots.add_pages(first, 2, range(10, 60))
    assert slots.pages[first].tolist()[:4] == [5, 6, 10, 11]
    assert slots.options[:, first].tolist() == [0.5, 7.0, 1.0, 0.0]
    assert int(slots.seeds[first]) == 2**64 - 3
    assert slots.edited[first]
    slots.free(first, 52)
    again = slots.take(request_of(temperature=0.0))
    assert again == first
    assert not slots.pages.any()
    assert not slots.edited[again]


def test_more_requests_than_slots_keep_what_the_slots_hold() -> None:
    slots = RunningSlots()
    taken = [slots.take(request_of(temperature=0.01 * place)) for place in range(100)]
    for slot in taken:
        slots.add_pages(slot, 0, [slot] * 20)
    assert sorted(taken) == [*range(100)]
    assert slots.options[0, taken] == pytest.approx(0.01 * np.arange(100))
    assert (slots.pages[:100, :20] == np.arange(100)[:, None]).all()


@pytest.fixture
def short_way(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each token that was chosen for a plain request, whether it took the short way."""
    taken: list[bool] = []
    accept = OutputAppender.accept_plain

    def noted(self: OutputAppender, request: Request, token: int) -> bool:
        taken.append(accept(self, request, token))
        return taken[-1]

    monkeypatch.setattr(OutputAppender, "accept_plain", noted)
    return taken


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": False},
        {"speculation": True},
        {"page_size": 4, "num_pages": 36, "longest": 50},
        {"chunk_tokens": 7},
    ],
    ids=["plain", "drafts", "short-of-pages", "chunks"],
)
def test_the_short_way_changes_no_output(
    tiny_folder: Path, options: dict[str, Any], short_way: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for plain in (True, False):
        if not plain:
            monkeypatch.setattr(Request, "find_plain", lambda request: None)
        load = Load(tiny_folder, overlap=False, seed=3, **options)
        results.append([told(result) for result in load.run()])
        counters = load.local.scheduler.counters
        results[-1] += [counters.output_tokens, counters.forced_tokens, counters.computed_tokens]
        if plain:
            assert short_way.count(True) > 20
            short_way.clear()
    assert not short_way
    assert results[0] == results[1]


@pytest.mark.parametrize("options", [{"frequency_penalty": 0.5}, {"min_tokens": 40}], ids=str)
def test_a_token_after_accepted_drafts_of_its_step_is_sent_after_them(
    tiny_folder: Path, options: dict[str, Any]
) -> None:
    local = LocalScheduler(tiny_folder, speculation=True, tuning=Tuning(least_gain=0.0))
    params = {"temperature": 1.0, "seed": 7, "max_tokens": 40, "ignore_eos": True} | options
    prompt = [5, 6, 7, 8] * 3
    [first] = local.complete([prompt], **params)
    [again] = local.complete([prompt], **params)  # the prefix cache holds the output: its tokens are drafts
    assert local.scheduler.counters.accepted_tokens > 0
    assert len(set(first.ids)) > 10
    assert again.ids == first.ids
