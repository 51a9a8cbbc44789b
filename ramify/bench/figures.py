"""Figures of a load test: percentiles, throughput, goodput under a latency bound, validity of JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ramify.bench.client import Sample
from ramify.bench.load import Measured
from ramify.errors import InvalidRequest

BOUNDS = ("ttft", "tpot", "e2e")
"""The latencies that a goodput bound can name: time to first text, time per output token, end-to-end time."""


def read_bounds(text: str) -> dict[str, float]:
    """Parse bounds such as ``ttft=500,tpot=50``, in milliseconds; returns name → seconds."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            limit = float(value) / 1000
        except ValueError:
            limit = 0.0
        if name not in BOUNDS or limit <= 0:
            raise InvalidRequest(
                f"--goodput {part!r} is not one of {', '.join(f'{bound}=MS' for bound in BOUNDS)}.",
                field="goodput",
            )
        bounds[name] = limit
    return bounds


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and nearest-rank percentiles of `values`; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)

    def rank(percent: int) -> float:
        return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]

    return {
        "mean": sum(ordered) / len(ordered),
        "p50": rank(50),
        "p90": rank(90),
        "p95": rank(95),
        "p99": rank(99),
        "max": ordered[-1],
    }


def figures(measured: Measured, bounds: Mapping[str, float]) -> dict[str, Any]:
    """The figures of one phase.

    Failed requests are counted. They lower the goodput and the share of valid answers; the other figures
    exclude them.
    """
    samples, seconds = measured.samples, measured.duration_s
    good = [sample for sample in samples if sample.error is None]
    prompt, output, cached = (
        sum(getattr(sample, name) for sample in good)
        for name in ("prompt_tokens", "output_tokens", "cached_tokens")
    )
    found: dict[str, Any] = {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "first_error": next((sample.error for sample in samples if sample.error), None),
        "duration_s": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_share": cached / prompt if prompt else 0.0,
        "ttft_s": percentiles([sample.ttft_s for sample in good]),
        "itl_s": percentiles([gap for sample in good for gap in sample.itl_s]),
        "tpot_s": percentiles([tpot for sample in good if (tpot := sample.tpot_s) is not None]),
        "e2e_s": percentiles([sample.e2e_s for sample in good]),
        "client_cpu_share": measured.client_cpu_s / seconds,
    }
    if bounds:
        met = sum(meets(sample, bounds) for sample in good)
        found["goodput_per_s"] = met / seconds
        found["goodput_share"] = met / len(samples)
    checked = [sample for sample in samples if sample.schema is not None]
    if checked:
        valid = sum(is_valid(sample) for sample in checked)
        found["valid_share"] = valid / len(checked)
        found["valid_per_s"] = valid / seconds
    return found


def meets(sample: Sample, bounds: Mapping[str, float]) -> bool:
    """Whether the latencies of the request are within all bounds."""
    times = {"ttft": sample.ttft_s, "tpot": sample.tpot_s or 0.0, "e2e": sample.e2e_s}
    return all(times[name] <= limit for name, limit in bounds.items())


def is_valid(sample: Sample) -> bool:
    """Whether the answer is JSON that satisfies its schema."""
    from ramify.grammar.schema.instance import validate_text

    return sample.error is None and not validate_text(sample.schema, sample.text)


def median(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each figure over several runs. Counts of requests and of failures are summed instead."""
    merged: dict[str, Any] = {"runs": len(runs)}
    for name in runs[0]:
        values = [run[name] for run in runs if run[name] is not None]
        if name in ("requests", "failed"):
            merged[name] = sum(values)
        elif not values or isinstance(values[0], str):
            merged[name] = values[0] if values else None
        elif isinstance(values[0], dict):
            merged[name] = {key: statistics.median([value[key] for value in values]) for key in values[0]}
        else:
            merged[name] = statistics.median(values)
    return merged
