"""An engine in this process: a scheduler on a runner, without messages on the way."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from ramify.kernels.registry import Ops
from ramify.radix.cache import PrefixCache
from ramify.ring_messages import Failed, FlushCache, Reply, Submit
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.build import build_runner
from ramify.runtime.executor.device_defaults import with_defaults_of
from ramify.runtime.executor.memory import COW_PAGES
from ramify.runtime.model.context import with_context
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.hf_config import config_from_hf
from ramify.runtime.model.hub.resolve import ModelFiles
from ramify.runtime.model.load import dummy_model, load_model
from ramify.runtime.scheduler.limits import Limits
from ramify.runtime.scheduler.scheduler import Scheduler
from ramify.sampling_params import SamplingParams

WARM_STEPS = 4
QUEUE_CYCLES = 20_000_000
"""About 10 ms of a GPU's time, in which the host launches what is to be timed."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of a decoding step: as the user sees it, and of the device alone."""

    wall: float
    device: float

    @property
    def exposed(self) -> float:
        """The host's part that hides behind nothing."""
        return max(0.0, self.wall - self.device)


class LocalEngine:
    """Prompts' KV need not be computed: pages of zeros are put into the tree for them."""

    def __init__(self, shape: Path, config: EngineConfig) -> None:
        """`shape` is a config.json, for dummy weights, or a GGUF file."""

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

        self.runner = build_runner(config, load)
        self.device, self.dtype = self.runner.device, self.runner.pool.k.dtype
        self.model = self.runner.model
        self.runner.pool.k.zero_()
        self.runner.pool.v.zero_()
        pages = self.runner.pool.num_pages
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
        self._scheduler = Scheduler(
            dataclasses.replace(with_defaults_of(config, self.device), overlap=overlap),
            limits,
            self.runner,
            self._cache,
            None,  # type: ignore[arg-type]  # nothing is constrained
            self._failed.append,
        )
        self._random = random.Random(0)
        self._names = itertools.count()

    @property
    def cascades(self) -> bool:
        return self.runner.cascades

    def prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(self.model.config.vocab_size), k=tokens)

    def know(self, prompt: Sequence[int]) -> None:
        """Put `prompt` into the tree."""
        lock = self._cache.acquire(self._cache.match(_array(prompt)))
        whole = lock.length // self._page_size
        pages = self._cache.allocate(-(-len(prompt) // self._page_size) - whole)
        if pages is None:
            raise RuntimeError("the KV pages do not hold the prompts")
        self._cache.commit(lock, _array(prompt), lock.pages[:whole] + pages)
        self._cache.release(lock)

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> Step:
        """Steps in which all of `prompts`, which are known, decode."""
        for prompt in prompts:
            self._submit(prompt, steps + WARM_STEPS + 2)
        scheduler = self._scheduler
        for _ in range(WARM_STEPS):
            scheduler.step()
        if scheduler.stats().running != len(prompts) or self._failed:
            raise RuntimeError(f"not all requests decode: {scheduler.stats()} {self._failed}")
        self._wait()
        began = time.perf_counter()
        for _ in range(steps):
            scheduler.step()
        self._wait()
        wall = (time.perf_counter() - began) / steps
        device = self._device_time()
        self._end()
        return Step(wall, device)

    def prefill(self, tokens: int) -> float:
        """Time to first token of a prompt of `tokens` uncached tokens, in seconds."""
        self._submit(self.prompt(tokens), 1)
        self._wait()
        began = time.perf_counter()
        while self._scheduler.busy:
            self._scheduler.step()
        self._wait()
        taken = time.perf_counter() - began
        self._end()
        return taken

    def _device_time(self) -> float:
        """Seconds of one pass over a token of each running request, with logits and greedy choice.

        The token is the request's last one. Where that one begins a page, which the next step would take, it
        is the one before it, whose pass takes the same time.
        """
        extensions = []
        for request in self._scheduler._requests.running:
            stop = min(request.length, len(request.pages.ids) * self._page_size)
            extensions.append(Extension(request.ids, stop - 1, stop, request.pages.ids))
        batch = pack(extensions, self._page_size)

        def run() -> None:
            torch.argmax(self.runner.logits(self.runner.forward(batch)), dim=-1)

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

    def _submit(self, prompt: Sequence[int], tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._scheduler.receive(Submit(rid=str(next(self._names)), ids=tuple(prompt), sampling=sampling))

    def _end(self) -> None:
        while self._scheduler.busy:
            self._scheduler.step()
        if self._failed:
            raise RuntimeError(f"requests failed: {self._failed}")
        self._scheduler.receive(FlushCache(rid="flush"))
        self._failed.clear()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _array(prompt: Sequence[int]) -> np.ndarray:
    return np.asarray(prompt, np.int32)
