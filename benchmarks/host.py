"""The scheduler's own time in a decoding step: everything but the model.

    python -m benchmarks.host [--steps 300] [--prompt 8000] [--overlap] [--cases free plans]
    python -m benchmarks.host --server     # the time of all processes for a request: see `host_server`

A real scheduler with its tree, pages, packing and outputs runs on a stand-in for the model, which answers at
once with the same logits over a small vocabulary. Prints the time of a step at several batch sizes and for
several loads (`CASES`). Times are processor time of all threads; `wall` is by the clock. Both are the 10th
percentile of all steps, because other work on the machine slows many steps. The aim is 2 ms at 256 requests
of free text, 4 ms with penalties or grammars, and 6 ms at 1,024.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import host_server
from ramify import constraint
from ramify.engine_messages import Failed, Reply, Submit
from ramify.grammar.compile.child_jobs import answer
from ramify.grammar.vocabulary import Vocabulary
from ramify.kernels.registry import ops
from ramify.radix.cache import PrefixCache
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.batch import ForwardBatch
from ramify.runtime.executor.sampler import HostSampler
from ramify.runtime.processes.worker_start import finish_startup
from ramify.runtime.scheduler.grammars import GrammarStore
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.scheduler import Scheduler
from ramify.sampling_params import SamplingParams

VOCABULARY = 512
HIDDEN = 8
PAGE_SIZE = 16
BATCHES = (1, 8, 32, 128, 256, 1024)
WARM_UP = 20
"""Steps before the measured ones. The first takes the prompts."""
CASES = ("free", "sampled", "penalties", "grammars", "plans")
"""Greedy free text; drawn at a temperature; with a frequency and a repetition penalty; half of the requests
under a grammar; free text behind a prompt that all share but for its last page, and a GPU's plan of attention
in each step."""


class AnswersAtOnce:
    """A stand-in for a runner. With `plans`, a pass makes the plan of attention that it would need on an
    H100."""

    def __init__(self, *, plans: bool = False) -> None:
        self._plan = planner() if plans else None
        self._logits = torch.randn(1024, VOCABULARY)
        self._logits[:, 0] = -100.0  # nobody stops
        self.device = torch.device("cpu")
        draw = ops("cpu").sample_tokens
        assert draw is not None
        self.sampler = HostSampler(draw)
        self.adapters = self.pool = None  # no request names one, and no page is transferred

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if self._plan is not None:
            self._plan(batch.page_table.numpy(), batch.query_starts.numpy(), batch.kv_lens.numpy())
        return torch.zeros(len(batch.ids), HIDDEN)

    def logits(self, hidden: torch.Tensor, masks: object = ()) -> torch.Tensor:
        return self._logits[: len(hidden)].clone()


def planner() -> Callable[..., object]:
    """Plans attention of Llama-3.1-8B in bfloat16, with pages of `PAGE_SIZE`, for an H100."""
    from ramify.kernels.triton.cascade import plan_from_page_tables  # imports Triton, which takes a second
    from ramify.kernels.triton.plan.attention_config import H100, tiles
    from ramify.kernels.triton.plan.attention_plan import Shape

    shape = Shape(32, 8, 128, 2, PAGE_SIZE, 0, False, tiles(128, torch.bfloat16, H100), H100)
    return functools.partial(plan_from_page_tables, shape=shape, device=torch.device("cpu"))


class Step(NamedTuple):
    """Seconds of a step: `processor` is the processor time of all threads, `wall` the time by the clock."""

    processor: float
    wall: float


def scheduler_of(
    batch: int, tokens: int, *, overlap: bool, plans: bool = False
) -> tuple[Scheduler, Vocabulary, list[Any]]:
    """A scheduler for `batch` requests of at most `tokens` tokens each, its vocabulary, and the list that
    collects its jobs for the grammar compiler."""
    config = EngineConfig(page_size=PAGE_SIZE, max_running=batch, chunk_tokens=1 << 22, overlap=overlap)
    pages = batch * (tokens // PAGE_SIZE + 8)
    limits = Limits(
        context_length=1 << 16,
        vocab_size=VOCABULARY,
        eos_token_ids=(0,),
        kv_tokens=pages * PAGE_SIZE,
    )
    texts = (
        b"",
        *(bytes([i]) for i in range(256)),
        *(bytes([97 + i % 26, 97 + i // 26]) for i in range(255)),
    )
    vocabulary = Vocabulary(texts, (0,))
    jobs: list[Any] = []
    store = GrammarStore(vocabulary, send=jobs.append, restart=lambda: None)
    runner: Any = AnswersAtOnce(plans=plans)
    return Scheduler(config, limits, runner, PrefixCache(pages, PAGE_SIZE), store, _fail), vocabulary, jobs


def _fail(message: Reply | Failed) -> None:
    raise RuntimeError(f"not all requests were decoding: {message}")


def step_time(batch: int, case: str, steps: int, prompt: int, *, overlap: bool = False) -> Step:
    """The time of a step of `batch` requests with prompts of `prompt` tokens, all decoding."""
    most = steps + 2 * WARM_UP
    plans = case == "plans"
    scheduler, vocabulary, jobs = scheduler_of(batch, prompt + most, overlap=overlap, plans=plans)
    random = np.random.default_rng(0)
    shared = max(0, prompt - PAGE_SIZE) if plans else 0
    common = random.integers(1, VOCABULARY, shared).tolist()
    for i in range(batch):
        held = constraint.regex("[a-z ]*") if case == "grammars" and i % 2 else None
        penalties = {"frequency_penalty": 0.5, "repetition_penalty": 1.1} if case == "penalties" else {}
        scheduler.receive(
            Submit(
                rid=str(i),
                ids=(*common, *random.integers(1, VOCABULARY, prompt - shared).tolist()),
                sampling=SamplingParams(
                    max_tokens=most,
                    temperature=1.0 if case == "sampled" else 0.0,
                    ignore_eos=held is None,
                    **penalties,
                ),
                constraint=held,
            )
        )
    for job in jobs:
        scheduler.receive(answer(job, vocabulary))  # type: ignore[arg-type]
    for _ in range(WARM_UP):
        scheduler.step()
    times = []
    for _ in range(steps):
        began = time.process_time(), time.perf_counter()
        scheduler.step()
        times.append((time.process_time() - began[0], time.perf_counter() - began[1]))
    if scheduler.stats().running != batch:
        raise RuntimeError(f"{scheduler.stats().running} of {batch} requests were decoding.")
    return Step(
        *(statistics.quantiles(each, n=10, method="inclusive")[0] for each in zip(*times, strict=True))
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=300, help="tokens of each prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--overlap", action="store_true", help="launch passes ahead, as on CUDA")
    parser.add_argument("--server", action="store_true", help="measure a whole server: see host_server")
    parser.add_argument("--requests", type=int, default=300, help="requests of each case, with --server")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all cases, with --server")
    chosen = parser.parse_args(arguments)
    if chosen.server:
        host_server.report(chosen.requests, chosen.rounds)
        return
    torch.set_num_threads(1)
    finish_startup()
    heads = [f"{case + ' ms':>13} {'us/request':>10} {'wall ms':>8}" for case in chosen.cases]
    print(f"{'batch':>6}", *heads, sep="")
    for batch in chosen.batches:
        line = f"{batch:6d}"
        for case in chosen.cases:
            step = step_time(batch, case, chosen.steps, chosen.prompt, overlap=chosen.overlap)
            processor, wall = step.processor * 1e3, step.wall * 1e3
            line += f"{processor:13.3f} {processor / batch * 1e3:10.1f} {wall:8.3f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
