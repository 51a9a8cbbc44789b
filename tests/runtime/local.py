"""A scheduler without processes: the tests drive its steps themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ramify.engine_messages import ChoiceTokens, DecisionTokens, Failed, Reply, Submit
from ramify.errors import RamifyError, from_info
from ramify.messages import ChoiceScore, Continuation, Finish, Pooling, Usage
from ramify.questions import DecisionScores
from ramify.radix.cache import NaiveCache, PrefixCache
from ramify.runtime.cold.store import ColdStore
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.device import resolve_ops
from ramify.runtime.executor.kv_pool import KvPool, StatePool, pool_for
from ramify.runtime.executor.memory import states_in, with_defaults
from ramify.runtime.executor.runner import Runner
from ramify.runtime.kv_transfer.identity import kv_identity
from ramify.runtime.model.checkpoint import ModelFiles, is_eagle3, tensor_names
from ramify.runtime.model.loading.load import load_model
from ramify.runtime.model.shape.heads import eagle3_head, own_head
from ramify.runtime.scheduler.requests.limits import TUNED, Limits, Tuning
from ramify.runtime.scheduler.requests.parts import Logprob
from ramify.runtime.scheduler.scheduler import Scheduler
from ramify.sampling_params import SamplingParams


@dataclasses.dataclass
class Result:
    """The output of one request so far."""

    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Logprob] = dataclasses.field(default_factory=list)
    choices: tuple[ChoiceScore, ...] = ()
    decisions: DecisionScores | None = None
    embedding: bytes = b""
    finish: Finish | None = None
    usage: Usage | None = None
    error: RamifyError | None = None
    forced: list[int] = dataclasses.field(default_factory=list)
    """Indices in `ids` of the tokens that a grammar forced."""
    overlap: str = ""
    """The end of the prompt's text with which the first output token begins (token healing)."""
    replaced: int = 0

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None


class WatchedRunner(Runner):
    """A runner with callbacks, which may raise: `before_pass` gets each batch; `before_logits` is called
    before logits are computed, `before_check` before the device is checked."""

    before_pass: Callable[[Any], object] = staticmethod(lambda batch: None)
    before_logits: Callable[[], object] = staticmethod(lambda: None)
    before_check: Callable[[], object] = staticmethod(lambda: None)

    def _forward(self, batch: Any) -> torch.Tensor:
        self.before_pass(batch)
        return super()._forward(batch)

    def logits(self, *arguments: Any) -> torch.Tensor:
        self.before_logits()
        return super().logits(*arguments)

    def check_device(self) -> None:
        self.before_check()
        super().check_device()


def fail(*_: object) -> None:
    raise ZeroDivisionError


class LocalScheduler:
    """A real scheduler with a real model in this process, which a test steps.

    `weights`: the files of `model`. They identify its KV pages in transfers. `cold` returns the stores of the
    cold tier; it may ask for `runner` and `config`.
    """

    def __init__(
        self,
        model: torch.nn.Module | Path,
        *,
        clock: Callable[[], float] | None = None,
        grammars: Any = None,
        retokenizer: Any = None,
        healer: Any = None,
        graphs: Sequence[int] = (),
        make_runner: type[Runner] = WatchedRunner,
        draft: torch.nn.Module | Path | None = None,
        weights: Path | None = None,
        tuning: Tuning = TUNED,
        cold: Callable[[LocalScheduler], Sequence[ColdStore]] = lambda local: (),
        **options: Any,
    ) -> None:
        options.setdefault("num_pages", 256)
        options.setdefault("dtype", "float32")
        self.config = with_defaults(EngineConfig(check_pages=True, **options), None)
        weights = model if isinstance(model, Path) else weights
        self._kernels = resolve_ops(self.config, torch.device("cpu"))[1]
        model = self._loaded(model)
        shape = model.config
        config = self.config
        assert config.num_pages is not None
        states = None
        if shape.states is not None:
            slots = states_in(config, shape, 0, torch.device("cpu"))
            states = StatePool(shape.states, num_slots=slots)
            states.conv.fill_(float("nan"))
            states.recurrent.fill_(float("nan"))
        self.cache = (PrefixCache if config.prefix_cache == "radix" else NaiveCache)(
            config.num_pages,
            config.page_size,
            num_states=0 if states is None else states.num_slots,
            clock=clock or time.monotonic,
        )
        limits = Limits(
            context_length=config.context_length or shape.context_length,
            vocab_size=shape.vocab_size,
            eos_token_ids=shape.eos_token_ids,
            kv_tokens=(config.num_pages - 2) * config.page_size,
            max_output_tokens=config.max_output_tokens,
        )
        # The draft model first: a draft head says which layers of the model it reads.
        draft_model = None if draft is None else self._loaded_draft(draft, model)
        self.runner = runner = make_runner(model, self._pool(model), self._kernels, states=states)
        self.draft_runner = draft_model and WatchedRunner(draft_model, self._pool(draft_model), self._kernels)
        for each in (runner, self.draft_runner) if graphs else ():
            if each is not None and not each.model.hidden_input_width:
                each.capture_graphs(graphs, -(-limits.context_length // config.page_size))
        ticks = itertools.count()
        self.results: dict[str, Result] = {}
        self.replies: list[Reply] = []
        self.failures: list[Failed] = []
        """Failures of messages other than requests."""
        self.scheduler = Scheduler(
            config,
            limits,
            runner,
            self.cache,
            grammars,
            self._reply,
            clock or (lambda: next(ticks) * 1e-3),
            retokenizer=retokenizer,
            healer=healer,
            draft_runner=self.draft_runner,
            kv_identity=None if weights is None else lambda: kv_identity(self.config, runner.pool, weights),
            tuning=tuning,
            cold=cold(self),
        )
        self._count = itertools.count()

    def _loaded_draft(self, draft: torch.nn.Module | Path, model: Any) -> Any:
        head = None
        if isinstance(draft, Path) and is_eagle3(draft):
            head = eagle3_head(draft, "head", model.config)
        elif isinstance(draft, Path):
            names = tensor_names(draft)
            head = own_head(model.config, lambda: names)
        loaded = self._loaded(draft, head)
        if head is not None:
            loaded.attach(model)
        return loaded

    def _loaded(self, model: torch.nn.Module | Path, shape: Any = None) -> Any:
        if not isinstance(model, Path):
            return model
        files = ModelFiles(name="tiny", weights=model, tokenizer=model)
        whole = self._kernels.deterministic
        dtype = getattr(torch, self.config.dtype)
        return load_model(files, shape=shape, dtype=dtype, packed=whole, deterministic=whole)

    def _pool(self, model: Any) -> KvPool:
        config = self.config
        assert config.num_pages is not None
        dtype = getattr(torch, config.dtype)
        pool = pool_for(config, model.config, config.num_pages, dtype, torch.device("cpu"))
        # Rows that nobody has written must not matter: NaN, or int8 rows with a scale of NaN.
        pool.k.view(torch.uint8).fill_(0xFF)
        pool.v.view(torch.uint8).fill_(0xFF)
        return pool

    def submit(
        self,
        ids: Sequence[int],
        *,
        constraint: Any = None,
        scope: str = "",
        hint: Any = None,
        open_end: bool = False,
        choices: Sequence[ChoiceTokens] = (),
        forks: Sequence[int] = (),
        unconditional: bool = False,
        decide: DecisionTokens | None = None,
        pooling: Pooling | None = None,
        priority: int = 0,
        flow: str = "",
        key: str = "",
        lora: str = "",
        lora_revision: str = "",
        continues: Continuation | None = None,
        **sampling: Any,
    ) -> str:
        rid = f"r{next(self._count)}"
        sampling.setdefault("temperature", 0.0)
        self.results[rid] = Result()
        self.scheduler.receive(
            Submit(
                rid=rid,
                ids=tuple(ids),
                sampling=SamplingParams(**sampling).check(),
                constraint=constraint,
                scope=scope,
                hint=hint,
                open_end=open_end,
                choices=tuple(choices),
                forks=tuple(forks),
                unconditional=unconditional,
                decide=decide,
                pooling=pooling,
                priority=priority,
                flow=flow,
                key=key,
                lora=lora,
                lora_revision=lora_revision,
                continues=continues,
            )
        )
        return rid

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self._step()

    def _step(self) -> None:
        output = self.scheduler.step()
        for chunk in output.chunks if output is not None else ():
            result = self.results[chunk.rid]
            assert not result.ended, "a request has exactly one final message"
            result.forced += [len(result.ids) + place for place in chunk.forced]
            result.ids += chunk.ids
            result.overlap += chunk.overlap
            result.replaced += chunk.replaced
            for name in ("logprobs", "prompt_logprobs"):
                entries = getattr(chunk, name)
                if entries is not None:
                    getattr(result, name).extend(zip(entries.ids, entries.logprobs, entries.top, strict=True))
            result.choices += chunk.choices
            result.decisions = chunk.decisions
            result.embedding += chunk.embedding
            result.finish = chunk.finish
            result.usage = chunk.usage or result.usage

    @contextlib.contextmanager
    def failing(self, part: Literal["pass", "logits", "check"]) -> Iterator[None]:
        """Let the forward pass, the logits, or the check of the device fail in the block."""
        setattr(self.runner, f"before_{part}", fail)
        yield
        delattr(self.runner, f"before_{part}")

    def run(self, limit: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            self.step()
            if not self.scheduler.busy:
                return
        raise AssertionError(f"still busy after {limit} steps: {self.scheduler.stats()}")

    def complete(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Result]:
        rids = [self.submit(prompt, **sampling) for prompt in prompts]
        self.run()
        return [self.results[rid] for rid in rids]

    def _reply(self, message: Reply | Failed) -> None:
        if isinstance(message, Reply):
            self.replies.append(message)
        elif message.rid not in self.results:
            self.failures.append(message)
        else:
            assert not self.results[message.rid].ended
            self.results[message.rid].error = from_info(message.error)
