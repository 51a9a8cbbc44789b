"""Arrivals of a load test: a closed loop of fixed concurrency, or an open loop at a rate."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

from ramify.bench.client import LoadClient, Sample, read_chunks
from ramify.bench.workloads import CHAT, Job, Phase


@dataclass(frozen=True)
class Measured:
    """The requests of a phase in the order of the jobs, and the time of the phase."""

    samples: list[Sample]
    duration_s: float
    client_cpu_s: float
    """Processor seconds of the client alone."""


async def measure_phase(client: LoadClient, phase: Phase, rate: float | None, seed: str) -> Measured:
    """Send all jobs of `phase`: `concurrency` at a time, or, with a `rate`, as a Poisson process per second.

    Arrivals at a rate do not wait for answers (an open loop) and are the same for the same seed. The latency
    of a request that is sent late counts from when it was due.
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
        due, arrivals = start, []
        for index, job in enumerate(phase.jobs):
            arrivals.append(_arrive(client, job, due, done, index))
            due += draw.expovariate(rate)
        await asyncio.gather(*arrivals)
    duration, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Measured([read_chunks(one) for some in done for one in some], duration, cpu)


async def _arrive(client: LoadClient, job: Job, due: float, done: list[list[Sample]], index: int) -> None:
    # A timer of the event loop may end early, by as much as the loop was busy when it was set.
    while (left := due - time.perf_counter()) > 0:
        await asyncio.sleep(left)
    done[index] = await _send_job(client, job, due)


async def _send_job(client: LoadClient, job: Job, due: float | None) -> list[Sample]:
    """The requests of a job in sequence; a chat ends at its first failure."""
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
