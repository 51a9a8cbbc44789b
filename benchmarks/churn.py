"""Is anything lost when replicas are killed, drained, added and restarted under load?

    python -m benchmarks.churn [--minutes 30] [--replicas 2] [--streams 64] [--each 8] [--every-s 8]

Answers of every kind (greedy, seeded, stop strings, token healing, grammars, select, forks, compiled
programs, tool calls) are taken once while nothing happens. Then `--streams` jobs run at a time, and every
`--every-s` seconds something happens to a replica: a process is killed with SIGKILL, or it is drained, added
or restarted. Every answer must equal the known one. Prints counts; exits with 1 where an answer was lost or
differs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ramify.errors import RamifyError
from ramify.runtime.engine.engine import Engine
from tests.fleet.jobs import Job, all_jobs

ROLES = ("scheduler", "tokenizer", "detokenizer")
APART_S = 22.0
"""At least so far apart are kills: more than three deaths of one replica within a minute end it."""


class Churn:
    """Does something to a replica now and then."""

    def __init__(self, engine: Engine, draw: random.Random, most: int) -> None:
        self.engine = engine
        self.draw = draw
        self.most = most
        self.counts: Counter[str] = Counter()
        self.killed_at = -APART_S

    def once(self) -> None:
        states = {one.name: one for one in self.engine.replicas()}
        up = [name for name, one in states.items() if one.state == "up"]
        possible = []
        if len(up) > 1:
            possible += ["drain", "restart"]
        if len(states) < self.most:
            possible += ["add", "add"]
        if up and time.monotonic() - self.killed_at >= APART_S:
            possible += ["kill"] * 4
        if not possible:
            self.counts["nothing"] += 1
            return
        what = self.draw.choice(possible)
        name = self.draw.choice(up) if up else ""
        try:
            if what == "add":
                self.engine.add_replica()
            elif what == "drain":
                self.engine.drain_replica(name, self.draw.choice([0.0, 1.0, 20.0]))
            elif what == "restart":
                self.engine.restart_replica(name, self.draw.choice([0.0, 1.0, 20.0]))
            else:
                role = self.draw.choice(ROLES)
                what = f"kill {role}"
                self.killed_at = time.monotonic()
                os.kill(states[name].pids[role], signal.SIGKILL)
        except (RamifyError, KeyError, ProcessLookupError) as error:
            print(f"    {what} {name}: {error}", flush=True)
            what = f"{what} refused"
        self.counts[what] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=64, help="jobs at the same time")
    parser.add_argument("--each", type=int, default=8, help="different jobs of each kind")
    parser.add_argument("--every-s", type=float, default=8.0, help="seconds between two events")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=None)
    args = parser.parse_args()
    options: dict[str, Any] = {} if args.model is None else {"model": args.model}
    jobs = all_jobs(args.each)
    results: Counter[tuple[str, str]] = Counter()
    # Equal bits whatever runs beside a request: without this two tokens that are close may change places.
    with (
        Engine(replicas=args.replicas, deterministic=True, **options) as engine,
        ThreadPoolExecutor(args.streams) as pool,
    ):
        print(f"taking the answers of {len(jobs)} jobs", flush=True)
        known: dict[Job, Any] = dict(zip(jobs, pool.map(lambda job: job.answer(engine), jobs), strict=True))
        most = max(args.replicas, len(os.sched_getaffinity(0)))  # more are refused
        churn = Churn(engine, random.Random(args.seed), most)
        ends = time.monotonic() + 60 * args.minutes
        over = threading.Event()

        def work(worker: int) -> None:
            draw = random.Random(f"{args.seed} {worker}")
            while not over.is_set():
                job = draw.choice(jobs)
                try:
                    found = job.answer(engine)
                except Exception as error:
                    results[job.kind, "lost"] += 1
                    print(f"    lost: {job}: {error!r}", flush=True)
                    continue
                if found == known[job]:
                    results[job.kind, "equal"] += 1
                else:
                    results[job.kind, "different"] += 1
                    print(f"    different: {job}:\n      {found!r}\n      {known[job]!r}", flush=True)

        workers = [pool.submit(work, worker) for worker in range(args.streams)]
        try:
            while time.monotonic() < ends:
                time.sleep(args.every_s)
                churn.once()
                done = Counter(dict.fromkeys(("equal", "different", "lost"), 0))
                for (_, result), count in results.items():
                    done[result] += count
                print(
                    f"{ends - time.monotonic():7.0f} s left  {dict(done)}  {dict(churn.counts)}", flush=True
                )
        finally:
            over.set()
        for worker in workers:
            worker.result()
    print("\nkind       equal  different  lost")
    for kind in dict.fromkeys(job.kind for job in jobs):
        counts = [results[kind, result] for result in ("equal", "different", "lost")]
        print(f"{kind:<9} {counts[0]:>6} {counts[1]:>10} {counts[2]:>5}")
    print(", ".join(f"{count} x {what}" for what, count in sorted(churn.counts.items())))
    wrong = sum(count for (_, result), count in results.items() if result != "equal")
    sys.exit(1 if wrong or not results else 0)


if __name__ == "__main__":
    main()
