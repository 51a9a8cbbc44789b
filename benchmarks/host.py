"""The scheduler's own time in a decoding step: everything but the model.

    python -m benchmarks.host [--steps 300]

A real scheduler with its tree, pages, packing and outputs over a model that answers at once with the same
logits over a small vocabulary. Prints the median time of a step at several batch sizes, and what a request
adds; then the same with half of the requests under a grammar. The aim is 0.3 ms and 10 us a request.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from ramify import constraint
from ramify.grammar.compile.job import answer
from ramify.grammar.vocabulary import Vocabulary
from ramify.kernels.registry import ops
from ramify.radix.cache import PrefixCache
from ramify.ring_messages import Failed, Reply, Submit
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.sampler import HostSampler
from ramify.runtime.scheduler.constraints.grammars import GrammarStore
from ramify.runtime.scheduler.limits import Limits
from ramify.runtime.scheduler.scheduler import Scheduler
from ramify.sampling_params import SamplingParams

VOCABULARY = 512
HIDDEN = 8
PROMPT = 300
PAGE_SIZE = 16
BATCHES = (1, 8, 32, 128, 256)


class AnswersAtOnce:
    """In the place of `Runner`."""

    def __init__(self) -> None:
        self._logits = torch.randn(1024, VOCABULARY)
        self._logits[:, 0] = -100.0  # nobody stops
        draw = ops("cpu").sample_tokens
        assert draw is not None
        self.sampler = HostSampler(draw)
        self.adapters = None  # no request names one

    def forward(self, batch: Any) -> torch.Tensor:
        return torch.zeros(len(batch.ids), HIDDEN)

    def logits(self, hidden: torch.Tensor, masks: object = ()) -> torch.Tensor:
        return self._logits[: len(hidden)].clone()


def scheduler_of(batch: int) -> tuple[Scheduler, list[object]]:
    config = EngineConfig(page_size=PAGE_SIZE, max_running=batch, chunk_tokens=1 << 20)
    pages = batch * (PROMPT // PAGE_SIZE + 80)
    limits = Limits(
        context_length=1 << 16,
        vocab_size=VOCABULARY,
        eos_token_ids=(0,),
        kv_tokens=pages * PAGE_SIZE,
    )
    tokens = (
        b"",
        *(bytes([i]) for i in range(256)),
        *(bytes([97 + i % 26, 97 + i // 26]) for i in range(255)),
    )
    vocabulary = Vocabulary(tokens, (0,))
    jobs: list[Any] = []
    store = GrammarStore(vocabulary, send=jobs.append, restart=lambda: None)
    replies: list[Reply | Failed] = []
    runner: Any = AnswersAtOnce()
    cache = PrefixCache(pages, PAGE_SIZE)
    scheduler = Scheduler(config, limits, runner, cache, store, replies.append)
    return scheduler, [vocabulary, jobs, replies]


def step_times(batch: int, steps: int, constrained: bool) -> list[float]:
    scheduler, (vocabulary, jobs, replies) = scheduler_of(batch)
    random = np.random.default_rng(0)
    for i in range(batch):
        held = constraint.regex("[a-z ]*") if constrained and i % 2 else None
        scheduler.receive(
            Submit(
                rid=str(i),
                ids=tuple(random.integers(1, VOCABULARY, PROMPT).tolist()),
                sampling=SamplingParams(max_tokens=steps + 40, temperature=0.0, ignore_eos=held is None),
                constraint=held,
            )
        )
    for job in jobs:  # type: ignore[attr-defined]
        scheduler.receive(answer(job, vocabulary))  # type: ignore[arg-type]
    for _ in range(20):
        scheduler.step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        scheduler.step()
        times.append(time.perf_counter() - began)
    if replies or scheduler.stats().running != batch:
        raise RuntimeError(f"not all requests were decoding: {replies}")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(f"{'batch':>6} {'free: ms':>10} {'us/request':>11} {'half constrained: ms':>22} {'us/request':>11}")
    alone: list[float] = []
    for batch in BATCHES:
        medians = [statistics.median(step_times(batch, steps, held)) * 1e3 for held in (False, True)]
        alone = alone or medians
        more = [
            f"{(m - a) / (batch - 1) * 1e3:11.1f}" if batch > 1 else " " * 11
            for m, a in zip(medians, alone, strict=True)
        ]
        print(f"{batch:6d} {medians[0]:10.3f} {more[0]} {medians[1]:22.3f} {more[1]}", flush=True)


if __name__ == "__main__":
    main()
