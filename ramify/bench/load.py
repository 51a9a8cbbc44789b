"""Arrivals of a load test: a closed loop of fixed concurrency, or an open loop at a rate."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Literal

from ramify.bench.client import LoadClient, Sample, read_chunks
from ramify.bench.workloads import CHAT, Job, Phase

Arrivals = Literal["poisson", "constant"]


@dataclass(frozen=True)
class Measured:
    """The samples of a phase, in the order of its jobs, and the duration of the phase."""

    samples: list[Sample]
    duration_s: float
    client_cpu_s: float
    """CPU seconds that the client used."""


async def measure_phase(
    client: LoadClient, phase: Phase, rate: float | None, seed: str, arrivals: Arrivals = "poisson"
) -> Measured:
    """Send all jobs of `phase`: `phase.concurrency` at a time, or with a `rate`, that many jobs a second.

    With a rate, requests do not wait for earlier answers (an open loop), and the times of arrival depend only
    on `seed`. The latency of a request that is sent late counts from the time at which it was due.

    arrivals : with a rate, a Poisson process, or equal intervals
    """
    done: list[list[Sample]] = [[] for _ in phase.jobs]
    cpu, start = time.process_time(), time.perf_counter()
    if rate is None:
        todo = iter(enumerate(phase.jobs))

        async def worker() -> None:
            for index, job in todo:
                done[index] = await _send_job(client, job, None)

        await asyncio.gather(*(worker() for _ in range(min(phase.concurrency, len(phase.jobs)))))
    else:
        draw = random.Random(seed)
        due, sent = start, []
        for index, job in enumerate(phase.jobs):
            sent.append(_arrive(client, job, due, done, index))
            due += draw.expovariate(rate) if arrivals == "poisson" else 1 / rate
        await asyncio.gather(*sent)
    duration, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Measured([read_chunks(one) for some in done for one in some], duration, cpu)


async def _arrive(client: LoadClient, job: Job, due: float, done: list[list[Sample]], index: int) -> None:
    # A timer of the event loop may end early, by as much as the loop was busy when it was set.
    while (left := due - time.perf_counter()) > 0:
        await asyncio.sleep(left)
    done[index] = await _send_job(client, job, due)


async def _send_job(client: LoadClient, job: Job, due: float | None) -> list[Sample]:
    """Send the requests of a job one after the other; returns their samples.

    A chat ends at its first failed request.
    """
    sample = await client.send(job.path, job.body, due)
    sample.schema = job.schema
    samples = [sample]
    messages = list(job.body.get("messages", ()))
    for said in job.follow_ups:
        if read_chunks(samples[-1]).error is not None:
            break
        messages += [{"role": "assistant", "content": samples[-1].text}, {"role": "user", "content": said}]
        samples.append(await client.send(CHAT, {**job.body, "messages": messages}))
    return samples
