"""Overlap scheduling under load, on a simulated device: the time for which the device waits for the host."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ramify.engine_messages import Abort, Submit
from ramify.radix.cache import PrefixCache
from ramify.runtime.config import EngineConfig
from ramify.runtime.scheduler.requests.limits import TUNED, Limits, Tuning
from ramify.runtime.scheduler.scheduler import Scheduler
from ramify.sampling_params import SamplingParams

END, VOCAB = 0, 50
WEIGHTS_S, TOKEN_S = 3.7e-3, 27e-6
"""Seconds of a step and of each of its tokens. Assumed for an 8B model in bfloat16, not measured."""
HOST_S = 3.5e-3
"""Host seconds of a step: bookkeeping, messages, scheduling."""


@dataclasses.dataclass
class Device:
    """A simulated device that runs launched passes in order. `now` is the host's clock."""

    now: float = 0.0
    free: float = 0.0
    busy: float = 0.0
    passes: int = 0
    tokens: int = 0

    def launch(self, seconds: float) -> None:
        self.free = max(self.now, self.free) + seconds
        self.busy += seconds
        self.passes += 1

    @property
    def idle(self) -> float:
        return 1 - self.busy / self.free


@dataclasses.dataclass
class Drawing:
    device: Device
    done: float
    tokens: torch.Tensor

    def result(self) -> tuple[list[int], list[Any]]:
        self.device.now = max(self.device.now, self.done)
        return self.tokens.tolist(), []


class ImitatedRunner:
    """A runner and sampler on the simulated device. A request's tokens depend only on its length."""

    def __init__(self, device: Device) -> None:
        self.device, self.adapters, self.pool = torch.device("cuda"), SimpleNamespace(), None
        self.sampler, self.imitated = self, device

    def forward(self, batch: Any) -> torch.Tensor:
        self.imitated.tokens += batch.tokens.shape[1]
        self.imitated.launch(WEIGHTS_S + TOKEN_S * batch.tokens.shape[1])
        return batch.tokens[1][:, None].float()  # positions

    def logits(self, hidden: torch.Tensor, masks: object = ()) -> torch.Tensor:
        return hidden

    def begin_draw(self, logits: torch.Tensor, rows: Any, asked: Any, top: int) -> Drawing:
        tokens = 1 + logits[:, 0].long() % (VOCAB - 1)
        return Drawing(self.imitated, self.imitated.free, tokens)


def scheduler_on(
    device: Device,
    config: EngineConfig,
    pages: int,
    failed: Any = None,
    context_length: int = 4096,
    tuning: Tuning = TUNED,
) -> Scheduler:
    """A scheduler on the simulated device, with `pages` pages of 16 tokens."""
    limits = Limits(
        context_length=context_length, vocab_size=VOCAB, eos_token_ids=(END,), kv_tokens=pages * 16
    )
    runner: Any = ImitatedRunner(device)
    none: Any = None
    return Scheduler(
        config, limits, runner, PrefixCache(pages, 16), none, failed, lambda: device.now, tuning=tuning
    )


def serve(
    *,
    overlap: bool,
    requests: int = 120,
    max_running: int = 32,
    seconds: float = float("inf"),
    aborts: bool = False,
) -> tuple[Device, Scheduler, list[Any]]:
    """Run a load with all places taken, until no request is left or for `seconds` of the device's time.

    requests : number of requests; with `seconds`, the most that wait at a time
    aborts : whether clients abort one request in twenty while it runs
    """
    endless = seconds < float("inf")
    device, rng = Device(), random.Random(3)
    config = EngineConfig(
        max_running=max_running, chunk_tokens=512, overlap=overlap, speculation=False, check_pages=not endless
    )
    failed: list[Any] = []
    scheduler = scheduler_on(device, config, max_running * 80, failed.append)
    numbers = itertools.count()

    def submit() -> None:
        index = next(numbers)
        ids = tuple(rng.randrange(1, VOCAB) for _ in range(rng.randrange(100, 900)))
        # Some end unforeseen, by a stop token: the host knows only when it has the token.
        stops = (rng.randrange(1, VOCAB),) if index % 3 == 0 else ()
        params = SamplingParams(max_tokens=rng.randrange(60, 200), temperature=0.0, stop_token_ids=stops)
        scheduler.receive(Submit(rid=str(index), ids=ids, sampling=params))

    for _ in range(requests):
        submit()
    outputs: list[Any] = []
    while scheduler.requests.waiting and device.now < seconds:
        output = scheduler.step()
        if not endless:
            outputs += [] if output is None else [(chunk.rid, chunk.ids) for chunk in output.chunks]
        device.now += HOST_S
        while endless and len(scheduler.requests.waiting) < requests:
            submit()
            if aborts and rng.random() < 0.05:
                scheduler.receive(Abort(rid=rng.choice(scheduler.requests.running).rid))
    assert not failed
    return device, scheduler, outputs


def test_a_loaded_device_hardly_waits_for_the_host() -> None:
    without, plain, expected = serve(overlap=False)
    assert without.idle > 0.2, "every step waits for the host's 3.5 ms"
    device, scheduler, outputs = serve(overlap=True)
    assert device.idle < 0.05
    assert (
        scheduler.counters.computed_tokens / device.free
        > 1.15 * plain.counters.computed_tokens / without.free
    )
    texts, others = (defaultdict[str, list[int]](list) for _ in range(2))
    for found, chunks in ((texts, outputs), (others, expected)):
        for rid, ids in chunks:
            found[rid] += ids
    for rid in texts.keys() & others.keys():
        length = min(len(texts[rid]), len(others[rid]))
        assert texts[rid][:length] == others[rid][:length]


@pytest.mark.long
def test_a_saturated_device_hardly_waits_while_requests_come_and_go() -> None:
    """The load runs for ten minutes of the device's time."""
    device, scheduler, _ = serve(overlap=True, requests=8, seconds=600.0, aborts=True)
    assert device.now >= 600.0
    assert scheduler.counters.computed_tokens > 1e6
    assert device.idle < 0.05


def test_chunks_of_prompts_are_launched_beside_decodes() -> None:
    """A decode and a long prompt: after the first chunk, each pass has both, and none is in vain."""
    device, rng = Device(), random.Random(1)
    config = EngineConfig(overlap=True, speculation=False, max_running=128, chunk_tokens=64, check_pages=True)
    scheduler = scheduler_on(device, config, 400)
    for rid, length in (("short", 40), ("long", 500)):
        ids = tuple(rng.randrange(1, VOCAB) for _ in range(length))
        sampling = SamplingParams(max_tokens=30, temperature=0.0)
        scheduler.receive(Submit(rid=rid, ids=ids, sampling=sampling))
        for _ in range(3):
            scheduler.step()
    before, steps = device.passes, 0
    while any(request.prefilling for request in scheduler.requests.running):
        scheduler.step()
        steps += 1
    assert steps >= 5
    assert device.passes - before == steps


@pytest.mark.parametrize("overlap", [False, True])
def test_chunks_end_in_time_beside_decodes(overlap: bool) -> None:
    """A prompt of 3,000 tokens beside two decodes: chunks grow from 16 tokens up to the target. Chunks
    launched ahead have the size that the next step wants, so none is in vain."""
    device, rng = Device(), random.Random(1)
    target = 0.015
    config = EngineConfig(
        overlap=overlap, speculation=False, max_running=128, chunk_tokens=2048, itl_target_ms=1e3 * target
    )
    scheduler = scheduler_on(device, config, 2000, context_length=8192)

    def submit(rid: str, length: int, tokens: int) -> None:
        ids = tuple(rng.randrange(1, VOCAB) for _ in range(length))
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        scheduler.receive(Submit(rid=rid, ids=ids, sampling=sampling))

    def step() -> float:
        began = device.now
        scheduler.step()
        device.now += 1e-3
        return device.now - began

    submit("first", 40, 1000)
    submit("second", 40, 1000)
    for _ in range(40):
        step()
    computed, gaps = device.tokens, []
    submit("long", 3000, 5)
    while any(request.rid == "long" for request in scheduler.requests.running) or not gaps:
        gaps.append(step())
        assert len(gaps) < 100
    assert device.tokens - computed < 1.1 * (3000 + 2 * len(gaps))
    assert max(gaps) < 1.2 * target


@pytest.mark.parametrize("higher", [False, True])
def test_nothing_is_launched_for_those_who_will_sit_out(higher: bool) -> None:
    device = Device()
    config = EngineConfig(
        overlap=True, speculation=False, max_running=128, chunk_tokens=512, check_pages=True
    )
    scheduler = scheduler_on(device, config, 400)
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    scheduler.receive(Submit(rid="first", ids=tuple(range(1, 40)), sampling=sampling))
    scheduler.step()
    scheduler.step()
    running = scheduler.requests.running
    scheduler.receive(Submit(rid="second", ids=tuple(range(1, 30)), sampling=sampling, priority=int(higher)))
    assert (scheduler.planner.ahead(running) is None) == higher


@pytest.mark.parametrize("priorities", [(0,), (0, -1), (1, 0, -1)])
def test_the_next_step_is_the_one_that_was_planned_ahead(priorities: tuple[int, ...]) -> None:
    """Requests of each priority decode and prefill while lower ones are left out. Both plans are the same."""
    device = Device()
    config = EngineConfig(overlap=True, speculation=False, max_running=16, chunk_tokens=64)
    tuning = Tuning(ride=1.0, patience_s=0.05)
    scheduler = scheduler_on(device, config, 3000, context_length=8192, tuning=tuning)
    for priority in priorities:
        for length in (20, 3000):
            sampling = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
            ids = tuple(1 + (index * length) % (VOCAB - 1) for index in range(length))
            scheduler.receive(
                Submit(rid=f"{priority} {length}", ids=ids, sampling=sampling, priority=priority)
            )
    planned: list[tuple[list[tuple[Any, int]], Any]] = []
    ahead = scheduler.planner.ahead

    def recorded(requests: Any) -> Any:
        chunks = ahead(requests)
        planned.append(([(request, request.length + 1) for request in requests], chunks))
        return chunks

    scheduler.planner.ahead = recorded  # type: ignore[method-assign]
    left_out = wrong = 0
    for _ in range(700):
        scheduler.step()
        device.now += HOST_S
        for requests, chunks in planned[:-1]:
            went_on = all(request.length > length for request, length in requests)
            as_planned = all(one.request.computed_len == one.stop for one in chunks or ())
            wrong += went_on != (chunks is not None) or not as_planned
            left_out += not went_on
        del planned[:-1]
    assert wrong <= 0.05 * 700, "a step takes less or more time than usual just where the turn depends on it"
    assert bool(left_out) == (len(priorities) > 1)
