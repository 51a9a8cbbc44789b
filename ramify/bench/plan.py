"""The course of a load test: alternation between endpoints, workloads, rates and repetitions."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from ramify.bench.client import Endpoint, LoadClient, read_chunks
from ramify.bench.figures import figures, median
from ramify.bench.load import Arrivals, Measured, measure_phase
from ramify.bench.workloads import COMPLETIONS, WORKLOADS, Sizes, phases, words
from ramify.errors import BackendError, InvalidRequest
from ramify.spelling import check_word

COMPARED: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests_per_s": ("req/s", ("requests_per_s",)),
    "output_tokens_per_s": ("out tok/s", ("output_tokens_per_s",)),
    "ttft_p50": ("TTFT p50", ("ttft_s", "p50")),
    "itl_p50": ("ITL p50", ("itl_s", "p50")),
    "itl_p99": ("ITL p99", ("itl_s", "p99")),
    "e2e_p50": ("E2E p50", ("e2e_s", "p50")),
    "valid_per_s": ("valid/s", ("valid_per_s",)),
}
"""Figures that are compared between endpoints: name → (heading of the column, path of the figure in a run's
figures)."""


@dataclass(frozen=True)
class Plan:
    """A load test."""

    endpoints: Sequence[Endpoint]
    """The endpoints under test. Within a run, all endpoints get the same prompts. If two of them are one
    server, the second finds the prompts in that server's prefix cache."""
    workloads: Sequence[str]
    sizes: Sizes
    rates: Sequence[float | None] = (None,)
    """Rates of arrival in requests per second. None: no rate, but the workload's concurrency."""
    runs: int = 1
    seed: str = "0"
    bounds: Mapping[str, float] = field(default_factory=dict)
    timeout_s: float | None = 600.0
    arrivals: Arrivals = "poisson"

    @property
    def measurements(self) -> int:
        """Number of lines that `run_plan` emits."""
        each = sum(len(phases(workload, "", self.sizes)) for workload in self.workloads)
        return each * len(self.endpoints) * len(self.rates) * self.runs


@dataclass
class Series:
    """The runs of one phase on one endpoint at one rate."""

    workload: str
    endpoint: str
    rate: float | None
    runs: list[dict[str, Any]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)

    def add_run(self, measured: Measured, found: dict[str, Any]) -> None:
        self.runs.append(found)
        for sample in measured.samples:
            if sample.error is None:
                self.ttft_s.append(sample.ttft_s)
                self.itl_s.extend(sample.itl_s)
                self.e2e_s.append(sample.e2e_s)

    @property
    def median(self) -> dict[str, Any]:
        return median(self.runs)


def check_workloads(names: Sequence[str], prompts: bool) -> None:
    """Raise `InvalidRequest` for an unknown workload, and for the workload "prompts" if `prompts` is False.

    `prompts`: whether the user gave prompts.
    """
    for name in names:
        check_word("--workload", name, list(WORKLOADS))
        if name == "prompts" and not prompts:
            raise InvalidRequest("--workload prompts needs --prompts FILE.", field="workload")


async def run_plan(plan: Plan, emit: Callable[[dict[str, Any]], None]) -> list[Series]:
    """Run the load test `plan`; returns the results of all phases.

    `emit` gets the line of each run when it is measured.

    Raises `BackendError` if no request of the load test succeeds.
    """
    found: dict[tuple[str, str, float | None], Series] = {}
    async with AsyncExitStack() as stack:
        clients = []
        for endpoint in plan.endpoints:
            client = LoadClient(endpoint, plan.timeout_s)
            stack.push_async_callback(client.aclose)
            clients.append(client)
            await _warm_up(client)
        for workload, rate, run_number in itertools.product(plan.workloads, plan.rates, range(plan.runs)):
            seed = f"{plan.seed}.{run_number}.{rate}"
            # the order of the endpoints alternates (A B, B A, …), so that drift cancels out
            for client in clients if run_number % 2 == 0 else reversed(clients):
                for phase in phases(workload, seed, plan.sizes):
                    measured = await measure_phase(client, phase, rate, seed, plan.arrivals)
                    result = figures(measured, plan.bounds)
                    key = (phase.label, client.endpoint.name, rate)
                    found.setdefault(key, Series(*key)).add_run(measured, result)
                    line = {"workload": key[0], "endpoint": key[1], "rate": rate, "run": run_number}
                    emit({**line, **result})
    if not any(one.ttft_s for one in found.values()):
        first = next(iter(found.values()))
        problem = str(first.runs[0]["first_error"])
        remedy = "Give a lower --max-tokens." if "max_output_tokens" in problem else None
        raise BackendError(f"No request succeeded on {first.endpoint}. {problem}", remedy=remedy)
    labels = list(dict.fromkeys(one.workload for one in found.values()))
    return sorted(found.values(), key=lambda one: (labels.index(one.workload), one.rate or 0.0))


async def _warm_up(client: LoadClient) -> None:
    """Send two short requests that are not measured, to open connections and to warm up the server."""
    for number in range(2):
        body = {"prompt": words(16, client.endpoint.name, number), "max_tokens": 8}
        sample = read_chunks(await client.send(COMPLETIONS, body))
        if sample.error is not None:
            raise BackendError(f"{client.endpoint.name} ({client.endpoint.address}): {sample.error}")


def ratios(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Ratios of the first endpoint's figures to the second's, for each phase and rate.

    Each is the median over pairs of runs.
    """
    lines = []
    names = list(dict.fromkeys(one.endpoint for one in series))
    if len(names) != 2:
        return []
    by_key = {(one.workload, one.rate, one.endpoint): one for one in series}
    for workload, rate in dict.fromkeys((one.workload, one.rate) for one in series):
        first, second = (by_key[workload, rate, name] for name in names)
        line: dict[str, Any] = {"workload": workload, "rate": rate, "ratio": f"{names[0]} / {names[1]}"}
        for name, (_, path) in COMPARED.items():
            pairs = [(_at(a, path), _at(b, path)) for a, b in zip(first.runs, second.runs, strict=True)]
            known = [a / b for a, b in pairs if a and b]
            if known:
                line[name] = statistics.median(known)
        lines.append(line)
    return lines


def _at(found: Any, path: Sequence[str]) -> Any:
    for name in path:
        found = None if found is None else found.get(name)
    return found
