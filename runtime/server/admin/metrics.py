"""Counters and histograms in Prometheus text (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ramify.messages import SchedulerStats

# A CPU decodes a token in some 10 ms, an accelerator in some 5 ms; prefill takes up to tens of seconds.
_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


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
        self.first_token_s = Histogram(
            "ramify_first_token_seconds",
            "Arrival to first token.",
            ["endpoint"],
            buckets=_REQUEST_S,
            registry=self.registry,
        )
        self.inter_token_s = Histogram(
            "ramify_inter_token_seconds",
            "Between tokens of one generation.",
            ["endpoint"],
            buckets=_TOKEN_S,
            registry=self.registry,
        )
        self.total_s = Histogram(
            "ramify_generation_seconds",
            "Arrival to end.",
            ["endpoint"],
            buckets=_REQUEST_S,
            registry=self.registry,
        )

    def render(self, stats: SchedulerStats | None) -> bytes:
        """All metrics as text; `stats` None says that the scheduler did not answer."""
        self._scheduler.stats = stats
        return generate_latest(self.registry)


class _SchedulerCollector:
    """The scheduler's own counters, which start again from 0 when it is restarted."""

    def __init__(self) -> None:
        self.stats: SchedulerStats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        up = int(stats is not None)
        yield GaugeMetricFamily("ramify_scheduler_up", "1 when the scheduler answers.", value=up)
        if stats is None:
            return
        requests = GaugeMetricFamily("ramify_requests", "Requests in the scheduler.", labels=["state"])
        for state in ("running", "waiting", "compiling"):
            requests.add_metric([state], getattr(stats, state))
        yield requests
        pages = GaugeMetricFamily("ramify_pages", "KV pages by state.", labels=["state"])
        for state in ("free", "evictable", "leased", "in_use"):
            pages.add_metric([state], getattr(stats, f"pages_{state}"))
        yield pages
        tokens = CounterMetricFamily("ramify_tokens", "Tokens by kind.", labels=["kind"])
        for kind in ("prompt", "cached", "computed", "output", "forced", "guessed", "accepted"):
            tokens.add_metric([kind], getattr(stats, f"{kind}_tokens"))
        yield tokens
        for name, value, help_text in (
            ("ramify_retractions", stats.retractions, "Requests retracted for want of pages."),
            ("ramify_evicted_pages", stats.evicted_pages, "Pages evicted from the tree."),
            ("ramify_steps", stats.steps, "Scheduler steps."),
            ("ramify_step_seconds", stats.step_s, "Time in steps."),
            ("ramify_model_seconds", stats.model_s, "Time in forward passes."),
        ):
            yield CounterMetricFamily(name, help_text, value=value)
