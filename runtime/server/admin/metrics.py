"""Counters and histograms in Prometheus text (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ramify.messages import SchedulerStats, Usage

# A CPU decodes a token in some 10 ms, an accelerator in some 5 ms; prefill takes up to tens of seconds.
_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class PromptTotals(NamedTuple):
    """The usage of all choices of one prompt, whose tokens count once.

    The first of several choices computes the prompt, and the others find it cached: cached are the fewest
    tokens that any of them found.
    """

    prompt: int
    cached: int
    completion: int
    forced: int

    @classmethod
    def of(cls, usages: Sequence[Usage]) -> PromptTotals:
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

    def end(self, usage: Usage) -> PromptTotals | None:
        """A choice has ended. Returns the totals with the last one."""
        self._ended.append(usage)
        return PromptTotals.of(self._ended) if len(self._ended) == self._n else None


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
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
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _REQUEST_S
        )
        self.inter_token_s = self._histogram(
            "inter_token_latency_seconds", "Between tokens of one generation.", _TOKEN_S
        )
        self.total_s = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_S)

    def count(self, totals: PromptTotals) -> None:
        """Count the tokens of one prompt and its choices."""
        self._tokens["prompt"].inc(totals.prompt)
        self._tokens["cached"].inc(totals.cached)
        self._tokens["computed"].inc(totals.prompt - totals.cached)
        self._tokens["generation"].inc(totals.completion)
        self._tokens["forced"].inc(totals.forced)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"ramify_{name}", help_text, ["endpoint"], buckets=buckets, registry=self.registry)

    def render(self, stats: SchedulerStats | None) -> bytes:
        """All metrics as text; `stats` is None where the scheduler did not answer."""
        self._scheduler.stats = stats
        return generate_latest(self.registry)


class _SchedulerCollector:
    """The scheduler's own figures, from 0 again after its restart. Names follow vLLM and SGLang."""

    def __init__(self) -> None:
        self.stats: SchedulerStats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        up = int(stats is not None)
        yield GaugeMetricFamily("ramify_scheduler_up", "1 when the scheduler answers.", value=up)
        if stats is None:
            return
        for name, value, help_text in (
            ("num_requests_running", stats.running, "Requests in the batch."),
            ("num_requests_waiting", stats.waiting, "Requests that wait for admission."),
            ("num_requests_compiling", stats.compiling, "Requests that wait for their grammar."),
        ):
            yield GaugeMetricFamily(f"ramify_{name}", help_text, value=value)
        pages = GaugeMetricFamily("ramify_kv_pages", "KV pages by state.", labels=["state"])
        for state in ("free", "evictable", "leased", "in_use"):
            pages.add_metric([state], getattr(stats, f"pages_{state}"))
        yield pages
        states = GaugeMetricFamily(
            "ramify_states", "Slots for states of linear attention layers.", labels=["state"]
        )
        for state in ("free", "held", "in_use"):
            states.add_metric([state], getattr(stats, f"states_{state}"))
        yield states
        for name, drafted, by_model, help_text in (
            ("draft", stats.draft_tokens, stats.model_draft_tokens, "Draft tokens verified."),
            ("accepted", stats.accepted_tokens, stats.model_accepted_tokens, "Draft tokens accepted."),
        ):
            tokens = CounterMetricFamily(
                f"ramify_spec_decode_num_{name}_tokens", help_text, labels=["source"]
            )
            tokens.add_metric(["prompt_lookup"], drafted - by_model)
            tokens.add_metric(["draft_model"], by_model)
            yield tokens
        for name, total, help_text in (
            (
                "model_tokens",
                stats.computed_tokens,
                "Tokens that went through the model: of prompts and outputs, draft tokens, those of requests"
                " without an answer, and again what retractions had dropped.",
            ),
            ("draft_model_tokens", stats.draft_model_tokens, "Tokens that went through the draft model."),
            ("draft_model_seconds", stats.draft_model_s, "Time in passes of the draft model."),
            ("retracted_requests", stats.retractions, "Requests retracted for want of KV pages."),
            ("evicted_kv_pages", stats.evicted_pages, "KV pages evicted from the prefix tree."),
            ("evicted_states", stats.evicted_states, "States evicted from the prefix tree."),
            ("steps", stats.steps, "Scheduler steps."),
            ("step_seconds", stats.step_s, "Time in steps."),
            ("model_seconds", stats.model_s, "Time in forward passes, logits and scoring."),
        ):
            yield CounterMetricFamily(f"ramify_{name}", help_text, value=total)
