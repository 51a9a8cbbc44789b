"""An engine in this process: a scheduler on a runner, without messages on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.jit import watched
from ramify import constraint
from ramify.constraint import Constraint
from ramify.engine_messages import Abort, Failed, FlushCache, Reply, Submit
from ramify.grammar.compile.child_jobs import answer
from ramify.grammar.vocabulary import Vocabulary
from ramify.kernels.arguments.pages import head_dim_of
from ramify.kernels.reference.kv_store import quantise_rows
from ramify.kernels.registry import Ops
from ramify.radix.cache import PrefixCache
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.build import build_runner
from ramify.runtime.executor.device import resolve_device
from ramify.runtime.executor.memory import COW_PAGES, with_defaults_of
from ramify.runtime.executor.sampler import SamplingBatch, SamplingRow
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.loading.load import dummy_model, load_model
from ramify.runtime.model.shape.context import with_context
from ramify.runtime.model.shape.hf_config import config_from_hf
from ramify.runtime.processes.worker_start import finish_startup
from ramify.runtime.scheduler.forward import MaskFiller
from ramify.runtime.scheduler.grammars import GrammarStore
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.scheduler import Scheduler
from ramify.sampling_params import SamplingParams

QUIET_STEPS = 8
"""Steps in a row after which an engine counts as warm: nothing is compiled or captured in them, and their
form does not wait for a graph of its own."""
MOST_WARM = 64, 12
"""The most warm-up steps of a decode, and the most warm-up prefills. Timed steps that still compile or
capture something are counted as `unsettled`."""
QUEUE_CYCLES = 40_000_000
"""About 20 ms of a GPU's time. Meanwhile the host plans and launches the work to be timed."""
BLOCK = 4_000_037
"""Count of random numbers with which KV pages are filled repeatedly: a prime, so that pages and heads
differ."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
WORDS = constraint.regex("[a-m ]*")
"""Constraint of masked requests: it allows half of the letters."""


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Seconds of the same work, timed several times, and how warm the engine was.

    warm : number of steps or prefills before the timed ones
    unsettled : number of timed steps or prefills in which something was compiled or captured, or that ran
        eagerly while their form waited for a graph
    """

    seconds: tuple[float, ...]
    warm: int
    unsettled: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The difference of the slowest and the fastest time, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


@dataclasses.dataclass(frozen=True)
class Step:
    """A decoding step. `rounds` are the times that the user sees, `device` the seconds of the device alone.

    positions : average number of positions whose KV a timed step reads
    """

    rounds: Rounds
    device: float
    positions: float

    @property
    def wall(self) -> float:
        return self.rounds.median

    @property
    def exposed(self) -> float:
        """Seconds of the host that do not overlap with the device's work."""
        return max(0.0, self.wall - self.device)


class LocalEngine:
    """An engine in this process. The KV of prompts need not be computed: pages of random numbers are put into
    the tree.

    memory : bytes of the device in use before anything was built, and of the weights and the KV pages;
        on the CPU only those of the pages are counted
    """

    def __init__(self, shape: Path, config: EngineConfig) -> None:
        """Build the engine. `shape` is a config.json, for dummy weights, or a GGUF file. The texts of tokens
        are made up."""

        def load(dtype: torch.dtype, device: torch.device, kernels: Ops) -> Model:
            if shape.suffix == ".gguf":
                model = load_model(
                    ModelFiles(shape.stem, shape, shape.parent),
                    dtype=dtype,
                    device=device,
                    context_length=config.context_length,
                    quantization="gguf",
                    packed=kernels.prefers_packed,
                    deterministic=kernels.deterministic,
                )
                assert isinstance(model, Model)
                return model
            model_config = with_context(config_from_hf(json.loads(shape.read_text())), config.context_length)
            packed = kernels.prefers_packed
            return dummy_model(
                model_config, dtype=dtype, device=device, packed=packed, deterministic=kernels.deterministic
            )

        def loaded(dtype: torch.dtype, device: torch.device, kernels: Ops) -> Model:
            before = _allocated(device)
            model = load(dtype, device, kernels)
            self.memory["weights"] = _allocated(device) - before
            return model

        self.memory = {"before": _used(resolve_device(config))}
        self._compiled = watched()
        began = time.perf_counter()
        self.runner = build_runner(config, loaded)
        self.build_s = time.perf_counter() - began
        self.device, self.dtype = self.runner.device, self.runner.pool.k.dtype
        self.model = self.runner.model
        fill(self.runner.pool.k)
        fill(self.runner.pool.v)
        pages = self.runner.pool.num_pages
        self.memory["pages"] = pages * self.runner.pool.page_bytes
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._page_size = self.runner.pool.page_size
        self.positions = (pages - COW_PAGES) * self._page_size
        self._cache = PrefixCache(pages, self._page_size)
        overlap = config.overlap if config.overlap is not None else self.device.type == "cuda"
        limits = Limits(
            context_length=self.model.config.context_length,
            vocab_size=self.model.config.vocab_size,
            eos_token_ids=self.model.config.eos_token_ids,
            kv_tokens=self.positions,
        )
        self._failed: list[Reply | Failed] = []
        self._jobs: list[Any] = []
        """Jobs for the grammar compiler, which this process does itself."""
        self._vocabulary = made_up_vocabulary(self.model.config.vocab_size, self.model.config.eos_token_ids)
        self._scheduler = Scheduler(
            dataclasses.replace(with_defaults_of(config, self.device), overlap=overlap),
            limits,
            self.runner,
            self._cache,
            GrammarStore(self._vocabulary, send=self._jobs.append, restart=lambda: None),
            self._failed.append,
        )
        self._random = random.Random(0)
        self._names = itertools.count()
        self._rids: list[str] = []

    def facts(self) -> dict[str, Any]:
        """The memory, and the counts of kernels compiled and graphs captured until now, as JSON."""
        captured = self.runner.captured
        peak = torch.cuda.max_memory_reserved() if self.device.type == "cuda" else 0
        memory = {**self.memory, "graphs": captured.bytes, "after": _used(self.device), "peak": peak}
        compiled = dataclasses.asdict(self._compiled)
        if self.runner.compiled is not None:  # by other processes, before the first launch
            compiled["kernels"] += self.runner.compiled.compiled
            compiled["seconds"] += self.runner.compiled.seconds
        return {
            "build_s": self.build_s,
            "compiled": compiled,
            "captured": {"graphs": captured.graphs, "seconds": captured.seconds},
            "memory": memory,
        }

    @property
    def masks(self) -> MaskFiller:
        return self._scheduler.forward.masks

    @property
    def cascades(self) -> bool:
        return self.runner.cascades

    def prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(self.model.config.vocab_size), k=tokens)

    def know(self, prompt: Sequence[int]) -> None:
        """Put `prompt` into the tree, with pages of random numbers as its KV."""
        lock = self._cache.acquire(self._cache.match(_array(prompt)))
        whole = lock.length // self._page_size
        pages = self._cache.allocate(-(-len(prompt) // self._page_size) - whole)
        if pages is None:
            raise RuntimeError("the KV pages do not hold the prompts")
        self._cache.commit(lock, _array(prompt), lock.pages[:whole] + pages)
        self._cache.release(lock)

    def decode(self, prompts: Sequence[Sequence[int]], steps: int, rounds: int = 2) -> Step:
        """Time `rounds` rounds of `steps` steps, in which a warm engine decodes all of `prompts`. Each prompt
        must have been given to `know`."""
        with self._decoding(prompts, steps * rounds) as warm:
            seconds, unsettled, before = [], 0, self._positions()
            for _ in range(rounds):
                with collecting_as_workers_do():
                    self._wait()
                    began = time.perf_counter()
                    for _ in range(steps):
                        work = self._work()
                        self._scheduler.step()
                        unsettled += self._work() != work
                    self._wait()
                    seconds.append((time.perf_counter() - began) / steps)
            after = self._positions()
            if after - before != rounds * steps * len(prompts):
                raise RuntimeError(
                    f"{rounds * steps} steps of {len(prompts)} requests gave {after - before} tokens"
                )
            device = self._device_time()
        return Step(Rounds(tuple(seconds), warm, unsettled), device, (before + after) / 2)

    @contextlib.contextmanager
    def decoding(
        self, prompts: Sequence[Sequence[int]], steps: int, masked: int = 0
    ) -> Iterator[Callable[[], object]]:
        """Context that gives a function. Each call takes one step in which a warm engine decodes all of
        `prompts`, the first `masked` of them under a grammar. At most `steps` calls are allowed. Each prompt
        must have been given to `know`."""
        with self._decoding(prompts, steps, masked):
            yield self._scheduler.step

    @contextlib.contextmanager
    def _decoding(self, prompts: Sequence[Sequence[int]], steps: int, masked: int = 0) -> Iterator[int]:
        """Context in which all of `prompts` decode in a warm engine, with `steps` steps left. Gives the
        number of warm-up steps."""
        with self._ended():
            for index, prompt in enumerate(prompts):
                self._submit(prompt, steps + MOST_WARM[0] + 2, WORDS if index < masked else None)
            for job in self._jobs:
                self._scheduler.receive(answer(job, self._vocabulary))  # type: ignore[arg-type]
            self._jobs.clear()
            scheduler = self._scheduler
            warm = self._warm(scheduler.step, QUIET_STEPS, MOST_WARM[0])
            if scheduler.stats().running != len(prompts) or self._failed:
                raise RuntimeError(f"not all requests decode: {scheduler.stats()} {self._failed}")
            yield warm

    def prefills(self, tokens: int, rounds: int = 3) -> Rounds:
        """Seconds to the first token, in a warm engine, of prompts of `tokens` uncached tokens."""
        warm = self._warm(lambda: self.prefill(tokens), 1, MOST_WARM[1])
        seconds, unsettled = [], 0
        for _ in range(rounds):
            work = self._work()
            seconds.append(self.prefill(tokens))
            unsettled += self._work() != work
        return Rounds(tuple(seconds), warm, unsettled)

    def prefill(self, tokens: int) -> float:
        """Seconds to the first token of one prompt of `tokens` uncached tokens."""
        with self._ended():
            self._submit(self.prompt(tokens), 1)
            self._wait()
            began = time.perf_counter()
            while self._scheduler.busy:
                self._scheduler.step()
            self._wait()
            return time.perf_counter() - began

    def _warm(self, run: Callable[[], object], quiet: int, most: int) -> int:
        """Call `run` until `quiet` calls in a row had nothing to compile or capture, at most `most` times.
        Returns the number of calls."""
        calls = still = 0
        while still < quiet and calls < most:
            work = self._work()
            run()
            calls += 1
            still = still + 1 if self._work() == work else 0
        return calls

    def _work(self) -> tuple[int, ...]:
        captured = self.runner.captured
        return captured.graphs, captured.awaited, self._compiled.kernels, self._compiled.loaded

    def _positions(self) -> int:
        return sum(request.length for request in self._scheduler.requests.running)

    def _device_time(self) -> float:
        """Seconds of one pass over one token of each running request, with logits and the sampler's kernels.

        The token is the request's last one, unless that token begins a page, which only the next step would
        allocate. In that case it is the token before the last, whose pass takes the same time.
        """
        extensions = []
        for request in self._scheduler.requests.running:
            stop = min(request.length, len(request.pages.ids) * self._page_size)
            extensions.append(Extension(request.ids, stop - 1, stop, request.pages.ids))
        batch = pack(extensions, self._page_size)

        rows = SamplingBatch.of([SamplingRow(GREEDY, uniform=0.0)] * len(extensions))

        def run() -> None:
            self.runner.sampler.begin_draw(self.runner.logits(self.runner.forward(batch)), rows, (), 0)

        run()
        return statistics.median(self._timed(run) for _ in range(7))

    def _timed(self, run: Callable[[], None]) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(QUEUE_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _submit(self, prompt: Sequence[int], tokens: int, held: Constraint | None = None) -> None:
        sampling = msgspec.structs.replace(
            GREEDY, max_tokens=tokens, min_tokens=tokens if held else 0, ignore_eos=held is None
        )
        self._rids.append(str(next(self._names)))
        submit = Submit(rid=self._rids[-1], ids=tuple(prompt), sampling=sampling, constraint=held)
        self._scheduler.receive(submit)

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        """Context that ends all requests and forgets all KV at its end, even after a failure.

        Raises
        ------
        RuntimeError
            If requests failed, though the code in the context did not raise.
        """
        try:
            yield
        finally:
            while self._rids:
                self._scheduler.receive(Abort(rid=self._rids.pop(), silent=True))
            while self._scheduler.busy:
                self._scheduler.step()
            failed = [*self._failed]
            self._scheduler.receive(FlushCache(rid="flush"))  # which is answered, too
            self._failed.clear()
        if failed:
            raise RuntimeError(f"requests failed: {failed}")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextlib.contextmanager
def collecting_as_workers_do() -> Iterator[None]:
    """Context with the garbage collector set as in a worker (`worker_start`): full collections take 50 ms."""
    thresholds = gc.get_threshold()
    gc.collect()
    finish_startup()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def made_up_vocabulary(size: int, stops: Sequence[int]) -> Vocabulary:
    """The bytes, and words of small letters. `stops` are the stop tokens."""
    words, length = [bytes([i]) for i in range(256)], 2
    while len(words) < size:
        words += (bytes(each) for each in itertools.product(range(97, 123), repeat=length))
        length += 1
    return Vocabulary(tuple(b"" if i in stops else words[i] for i in range(size)), tuple(stops))


def _array(prompt: Sequence[int]) -> np.ndarray:
    return np.asarray(prompt, np.int32)


def fill(pages: torch.Tensor) -> None:
    """Fill `pages` with numbers of N(0, 1). Zeros are no substitute: they may be multiplied faster."""
    generator = torch.Generator(pages.device).manual_seed(0)
    if pages.dtype == torch.int8:
        row = torch.randn(head_dim_of(pages), generator=generator, device=pages.device)
        pages.copy_(quantise_rows(row))
        return
    block = torch.randn(BLOCK, generator=generator, device=pages.device).to(pages.dtype)
    for part in pages.view(-1).split(BLOCK):
        part.copy_(block[: len(part)])


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _used(device: torch.device) -> int:
    """Bytes of a CUDA device that are in use by any process; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
