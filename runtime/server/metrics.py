"""Counters and histograms in Prometheus text (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

import functools
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ramify.messages import SchedulerStats, Usage
from ramify.questions import Question
from ramify.runtime.fleet.replica import State
from ramify.runtime.fleet.stats import FleetStats

# A CPU decodes a token in about 10 ms, an accelerator in about 5 ms. Prefill takes up to tens of seconds.
_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


MOST_LORAS = 256
"""Maximum number of loaded LoRA adapters. Equals `ramify.kernels.lora.MOST_SLOTS`; importing that module
would import torch."""


class PromptTotals(NamedTuple):
    """The usage of all choices of one prompt. The prompt's tokens count once.

    The first of several choices computes the prompt, and the others find it cached. So `cached` is the
    minimum of the choices' cached tokens.
    """

    prompt: int
    cached: int
    completion: int
    forced: int

    @classmethod
    def of_choices(cls, usages: Sequence[Usage]) -> PromptTotals:
        return cls(
            prompt=max(usage.prompt_tokens for usage in usages),
            cached=min(usage.cached_tokens for usage in usages),
            completion=sum(usage.completion_tokens for usage in usages),
            forced=sum(usage.forced_tokens for usage in usages),
        )


class ChoiceUsages:
    """The usages of the `n` choices of one prompt, until all have ended."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._ended: list[Usage] = []
        self._first: object = None

    def counts_prompt(self, choice: object) -> bool:
        """Whether the prompt's tokens, as `choice` reports them, count: for the first choice that asks."""
        if self._first is None:
            self._first = choice
        return self._first is choice

    def end_choice(self, usage: Usage) -> PromptTotals | None:
        """Add the usage of a choice that has ended. Returns the totals after the last choice, else None."""
        self._ended.append(usage)
        return PromptTotals.of_choices(self._ended) if len(self._ended) == self._n else None


class Metrics:
    """The metrics of one server, in a registry of its own. `blocked_s` returns the seconds for which the
    event loop has been blocked."""

    def __init__(self, blocked_s: Callable[[], float] = lambda: 0.0) -> None:
        self.registry = CollectorRegistry()
        self._loop = _LoopCollector(blocked_s)
        self.registry.register(self._loop)
        self._scheduler = _SchedulerCollector()
        self.registry.register(self._scheduler)
        self.responses = Counter(
            "ramify_http_responses", "HTTP answers.", ["endpoint", "status"], registry=self.registry
        )
        self.generations = Counter(
            "ramify_generations",
            "Generations by how they ended; finish is stop, length, abort or error.",
            ["endpoint", "status", "finish"],
            registry=self.registry,
        )
        self.questions = Counter(
            "ramify_questions",
            "Questions of decisions that were answered; kind is predicate, choice or score.",
            ["endpoint", "kind"],
            registry=self.registry,
        )
        tokens = (
            ("prompt", "Tokens of prompts: cached and computed. A prompt of several choices counts once."),
            ("cached", "Tokens of prompts found in the prefix cache."),
            ("computed", "Tokens of prompts that were not cached."),
            ("generation", "Tokens of outputs."),
            ("forced", "Tokens of outputs that a grammar forced."),
        )
        self._tokens = {
            name: Counter(
                f"ramify_{name}_tokens", f"{text} As the usage of answers has it.", registry=self.registry
            )
            for name, text in tokens
        }
        self.key_requests = Counter(
            "ramify_key_requests", "Requests that generated, by API key.", ["key"], registry=self.registry
        )
        self.key_refusals = Counter(
            "ramify_key_refusals",
            "Requests that were refused (429) by a limit of their API key.",
            ["key", "limit"],
            registry=self.registry,
        )
        self.key_tokens = Counter(
            "ramify_key_tokens",
            "Tokens by API key; kind is prompt, cached (of the prompt) or generation.",
            ["key", "kind"],
            registry=self.registry,
        )
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _REQUEST_S
        )
        self.inter_token_s = self._histogram(
            "inter_token_latency_seconds", "Between tokens of one generation.", _TOKEN_S
        )
        self.total_s = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_S)

    def count_tokens(self, totals: PromptTotals, key: str = "") -> None:
        """Count the tokens of one prompt and its choices, which the API key of this name asked for."""
        if key:
            kinds = {"prompt": totals.prompt, "cached": totals.cached, "generation": totals.completion}
            for kind, tokens in kinds.items():
                self.key_tokens.labels(key, kind).inc(tokens)
        self._tokens["prompt"].inc(totals.prompt)
        self._tokens["cached"].inc(totals.cached)
        self._tokens["computed"].inc(totals.prompt - totals.cached)
        self._tokens["generation"].inc(totals.completion)
        self._tokens["forced"].inc(totals.forced)

    def tokens(self) -> dict[str, int]:
        """The token counters of the requests that have ended, by name: "prompt", "cached" and so on."""
        return {
            name: int(next(iter(counter.collect())).samples[0].value)
            for name, counter in self._tokens.items()
        }

    def count_questions(self, endpoint: str, questions: Iterable[Question]) -> None:
        """Count questions that were answered about one state."""
        for kind, number in Counts(question.kind for question in questions).items():
            self.questions.labels(endpoint, kind).inc(number)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"ramify_{name}", help_text, ["endpoint"], buckets=buckets, registry=self.registry)

    def render(self, stats: SchedulerStats | None, loras: Iterable[str] = ()) -> bytes:
        """All metrics as text. `stats` has the scheduler's counters, or is None if it did not answer. `loras`
        has the names of the adapters that requests can use."""
        self.update(stats, loras)
        return generate_latest(self.registry)

    def update(self, stats: SchedulerStats | None, loras: Iterable[str]) -> None:
        """Set what `render` reports of the scheduler and the adapters."""
        self._scheduler.stats = stats
        self._scheduler.loras = sorted(loras)

    def of_server(self) -> list[Metric]:
        """The metrics that belong to the server, and to none of its models."""
        return [*self.responses.collect(), *self._loop.collect()]


class _LoopCollector:
    def __init__(self, blocked_s: Callable[[], float]) -> None:
        self._blocked_s = blocked_s

    def collect(self) -> Iterator[Metric]:
        text = "Seconds for which the server's event loop was blocked, for a second or more each time."
        yield CounterMetricFamily("ramify_event_loop_blocked_seconds", text, value=self._blocked_s())


class _SchedulerCollector:
    """Collector of the scheduler's counters, which start at 0 again when the scheduler restarts. The names of
    the metrics follow vLLM and SGLang."""

    def __init__(self) -> None:
        self.stats: SchedulerStats | None = None
        self.loras: list[str] = []

    def collect(self) -> Iterator[Metric]:
        if isinstance(self.stats, FleetStats):
            yield _states(self.stats)
            yield from _of_replicas(self.stats.replicas, ["replica"])
        else:
            yield from _of_replicas({"": self.stats}, [])
        if self.loras:
            labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
            text = "LoRA adapters that requests can name, as gateways read them: the time now, in seconds."
            info = GaugeMetricFamily("ramify_lora_requests_info", text, labels=labels)
            info.add_metric([str(MOST_LORAS), ",".join(self.loras), ""], time.time())
            yield info


def _states(stats: FleetStats) -> Metric:
    gauge = GaugeMetricFamily(
        "ramify_replicas", "Replicas by state: starting, up, draining, gone.", labels=["state"]
    )
    for state in get_args(State):
        gauge.add_metric([state], sum(one == state for one in stats.states.values()))
    return gauge


def _of_replicas(replicas: Mapping[str, SchedulerStats | None], labels: list[str]) -> Iterator[Metric]:
    """The metrics of the replicas. `labels` is ["replica"], for a label with the replica's name, or empty for
    a single replica."""
    up = GaugeMetricFamily("ramify_scheduler_up", "1 when the scheduler answers.", labels=labels)
    for replica, found in replicas.items():
        up.add_metric([replica][: len(labels)], int(found is not None))
    yield up
    present = [([replica][: len(labels)], found) for replica, found in replicas.items() if found is not None]
    for family in _FAMILIES if present else ():
        metric = family.kind(f"ramify_{family.name}", family.text, labels=[*labels, *family.labels])
        for label, stats in present:
            for own, value in family.rows(stats):
                metric.add_metric([*label, *own], value)
        yield metric


_Rows = Iterable[tuple[Sequence[str], float]]


class _Family(NamedTuple):
    """A metric made from the scheduler's counters. `rows` returns pairs: the values of `labels`, and the
    metric's value for them."""

    kind: type[GaugeMetricFamily | CounterMetricFamily]
    name: str
    text: str
    rows: Callable[[SchedulerStats], _Rows]
    labels: tuple[str, ...] = ()


def _field(kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, field: str, text: str) -> _Family:
    return _Family(kind, name, text, lambda stats: [((), getattr(stats, field))])


_gauge = functools.partial(_field, GaugeMetricFamily)
_counter = functools.partial(_field, CounterMetricFamily)


def _pool(name: str, prefix: str, text: str, kinds: Sequence[str]) -> _Family:
    def rows(stats: SchedulerStats) -> _Rows:
        return [((kind,), getattr(stats, f"{prefix}_{kind}")) for kind in kinds]

    return _Family(GaugeMetricFamily, name, text, rows, ("state",))


def _drafts(name: str, text: str) -> _Family:
    def rows(stats: SchedulerStats) -> _Rows:
        total, by_model = getattr(stats, f"{name}_tokens"), getattr(stats, f"model_{name}_tokens")
        return [(("prompt_lookup",), total - by_model), (("draft_model",), by_model)]

    return _Family(CounterMetricFamily, f"spec_decode_num_{name}_tokens", text, rows, ("source",))


def _transfers(name: str, text: str) -> _Family:
    def rows(stats: SchedulerStats) -> _Rows:
        return [((way,), getattr(stats, f"{way}ed_{name}")) for way in ("export", "import")]

    return _Family(CounterMetricFamily, f"kv_transfer_{name}", text, rows, ("direction",))


_FAMILIES = (
    _gauge("num_requests_running", "running", "Requests in the batch."),
    _gauge("num_requests_waiting", "waiting", "Requests that wait for admission."),
    _gauge("num_requests_compiling", "compiling", "Requests that wait for their grammar."),
    _Family(
        GaugeMetricFamily,
        "kv_cache_usage_perc",
        "The share of KV pages that running requests hold, from 0 to 1.",
        lambda stats: [((), stats.pages_in_use / stats.pages_total)],
    ),
    _Family(
        GaugeMetricFamily,
        "cache_config_info",
        "1, with the size of the KV cache.",
        lambda stats: [((str(stats.page_size), str(stats.pages_total)), 1)],
        ("page_size", "num_pages"),
    ),
    _pool("kv_pages", "pages", "KV pages by state.", ("free", "evictable", "leased", "in_use")),
    _gauge("pinned_kv_pages", "pages_pinned", "KV pages that pins hold, leased or in use."),
    _pool("states", "states", "Slots for states of linear attention layers.", ("free", "held", "in_use")),
    _drafts("draft", "Draft tokens verified."),
    _drafts("accepted", "Draft tokens accepted."),
    _transfers("tokens", "Tokens whose KV pages were copied to or from another replica."),
    _transfers("bytes", "Bytes of KV pages copied to or from another replica."),
    _counter(
        "model_tokens",
        "computed_tokens",
        "Tokens that went through the model: of prompts and outputs, draft tokens, those of requests"
        " without an answer, and again what retractions had dropped.",
    ),
    _counter("draft_model_tokens", "draft_model_tokens", "Tokens that went through the draft model."),
    _counter("draft_model_seconds", "draft_model_s", "Time in passes of the draft model."),
    _counter("retracted_requests", "retractions", "Requests retracted for want of KV pages."),
    _counter("evicted_kv_pages", "evicted_pages", "KV pages evicted from the prefix tree."),
    _counter("evicted_states", "evicted_states", "States evicted from the prefix tree."),
    _counter(
        "kv_transfer_refused",
        "refused_imports",
        "KV snapshots that were damaged, of another engine, or found no room.",
    ),
    _counter("cold_tokens", "cold_tokens", "Tokens whose KV pages were read from the cold tier."),
    _counter("cold_read_bytes", "cold_bytes", "Bytes of KV pages read from the cold tier."),
    _counter("cold_written_bytes", "cold_written_bytes", "Bytes of KV pages written to the cold tier."),
    _counter("cold_damaged_segments", "cold_damaged_segments", "Damaged segments of the cold tier."),
    _counter("steps", "steps", "Scheduler steps."),
    _counter("step_seconds", "step_s", "Time in steps."),
    _counter("model_seconds", "model_s", "Time in forward passes, logits and scoring."),
)
