"""Runs the parts of a call one after the other, each within its time limit, and keeps their output and
figures.

A part is a process in a process group of its own. It writes to ``FOLDER/A.log`` and ``FOLDER/A.jsonl``
itself. At its limit it gets, in this order:

    SIGINT    Python prints the traceback of the KeyboardInterrupt, pytest its summary
    SIGABRT   after 10 s: faulthandler prints all threads' stacks, also of a thread inside a CUDA call
    SIGKILL   after 2 s more, and with it every process that the part has started
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.gpu_visit.calls import Part
from benchmarks.gpu_visit.log import LOG_BYTES, Log
from benchmarks.gpu_visit.processes import MARK, Started

LOOK_S = 0.05
FREED_S = 5.0
"""Seconds within which the device memory of a killed process becomes free for the next part."""
LEAST_S = 5.0
"""Least seconds that a part gets even if earlier parts have overrun their limits."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True)
class Grace:
    """Seconds that a part has after SIGINT, and seconds that it then has after SIGABRT."""

    interrupt: float
    abort: float


AT_ITS_LIMIT = Grace(10.0, 2.0)
AT_OUR_END = Grace(3.0, 1.0)
"""Grace for the current part when the whole visit is stopped: short, because SIGKILL may follow soon."""


@dataclasses.dataclass(frozen=True)
class Ended:
    part: Part
    outcome: str
    seconds: float
    rows: Sequence[Mapping[str, Any]] = ()

    @property
    def failed(self) -> bool:
        return self.outcome != "passed"


class Call:
    """A call of the visit, as a context: inside, signals that would end this process stop the visit.

    folder : where ``NAME.log`` and ``NAME.jsonl`` are; both are appended to
    terminal : stream that gets a copy of the log; None: standard output
    clock : function that returns the time in seconds, by which limits are kept
    most : largest size of the log, in bytes
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        tiny: bool = False,
        at_its_limit: Grace = AT_ITS_LIMIT,
        at_our_end: Grace = AT_OUR_END,
        terminal: BinaryIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        most: int = LOG_BYTES,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.figures = folder / f"{name}.jsonl"
        self.tiny, self.stopped = tiny, False
        self._at_its_limit, self._at_our_end, self._clock = at_its_limit, at_our_end, clock
        self.log = Log(folder / f"{name}.log", terminal or sys.stdout.buffer, most=most)

    def __enter__(self) -> Call:
        self._before = {number: signal.signal(number, self._stop) for number in STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.log.close()

    def _stop(self, number: int, _: object) -> None:
        self.stopped = True

    def run(self, parts: Sequence[Part]) -> Iterator[Ended]:
        """Run `parts` and yield each as it ends.

        A part's limit is its own seconds plus the seconds that earlier parts left, less the seconds by which
        earlier parts overran. So a call overruns its limit only by the end of its last part, unless parts get
        `LEAST_S`.
        """
        left = 0.0
        for part in parts:
            if self.stopped:
                yield Ended(part, "not begun: the visit was stopped", 0.0)
                continue
            limit = part.seconds + left
            ended = self._run(part, max(limit, min(part.seconds, LEAST_S)))
            left = limit - ended.seconds
            yield ended

    def _run(self, part: Part, limit: float) -> Ended:
        self.log.write(f"--- {part.name}, at most {limit:.0f} s: {part.about}")
        found_before = self.figures.stat().st_size if self.figures.exists() else 0
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        began = self._clock()
        command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu_visit.parts", part.name]
        command += ["--figures", str(self.figures), "--seconds", str(limit), *["--tiny"] * self.tiny]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.log.fileno(),
            stderr=self.log.fileno(),
            # A group but no session: if a host ends our session at a time limit, the part ends with it.
            process_group=0,
            env=os.environ | _environment(self.tiny) | {MARK: mark},
        )
        started, cut = Started(process.pid, mark), None
        if not self._ends(process, began + limit, while_wanted=True):
            cut = self._cut(process, started)
        started.signal(signal.SIGKILL)
        if not self._are_gone(started, FREED_S):
            self.log.write(f"--- still there {FREED_S:.0f} s after SIGKILL: {started.living()}")
        seconds = self._clock() - began
        rows = rows_of(self.figures, found_before)
        outcome = cut or _outcome(process.returncode, sum("error" in row for row in rows))
        row = {
            "part": part.name,
            "case": "outcome",
            "outcome": outcome,
            "seconds": round(seconds, 2),
            "limit_s": round(limit, 2),
        }
        with self.figures.open("a") as file:
            # A killed process may have left half a line.
            file.write(f"{'' if _ends_with_a_line(self.figures) else chr(10)}{json.dumps(row)}\n")
        self.log.write(f"--- {part.name}: {outcome}, {seconds:.0f} s")
        return Ended(part, outcome, seconds, rows)

    def _ends(self, process: subprocess.Popen[bytes], limit: float, *, while_wanted: bool = False) -> bool:
        """Whether the process ends before the limit, and with `while_wanted` before the visit is stopped."""
        while process.poll() is None:
            if self._clock() >= limit or (while_wanted and self.stopped):
                return False
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
        return True

    def _are_gone(self, started: Started, seconds: float) -> bool:
        end = self._clock() + seconds
        while started.living():
            if self._clock() >= end:
                return False
            time.sleep(LOOK_S)
        return True

    def _cut(self, process: subprocess.Popen[bytes], started: Started) -> str:
        """Stop the part. Returns the outcome, which names the signal that ended it."""
        started.look()  # before they die
        if self.stopped:
            grace, outcome = self._at_our_end, "cut, as the visit was stopped, by "
        else:
            grace, outcome = self._at_its_limit, "cut at its limit by "
        self.log.write("--- SIGINT")
        os.killpg(process.pid, signal.SIGINT)
        if self._ends(process, self._clock() + grace.interrupt):
            return outcome + "SIGINT"
        self.log.write(f"--- SIGABRT, as it runs on {grace.interrupt:.0f} s after SIGINT")
        started.signal(signal.SIGABRT)
        self._are_gone(started, grace.abort)
        if process.poll() is not None:
            return outcome + "SIGABRT"
        self.log.write("--- SIGKILL")
        process.kill()
        process.wait()
        return outcome + "SIGKILL"


def _environment(tiny: bool) -> dict[str, str]:
    always = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if not tiny:
        return always
    few = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "2")
    return always | few | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def _outcome(status: int, cases: int) -> str:
    if status < 0:
        return f"crashed by {signal.Signals(-status).name}"
    if cases:
        return f"{cases} case{'s' * (cases > 1)} failed"
    return f"failed with status {status}" if status else "passed"


def _ends_with_a_line(path: Path) -> bool:
    return not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")


def rows_of(path: Path, offset: int = 0) -> list[dict[str, Any]]:
    """Rows of the file `path` after its first `offset` bytes. If rows of a case have `so_far`, their counts
    grow: only the last of them is returned."""
    found: dict[object, dict[str, Any]] = {}
    for place, line in enumerate(path.read_bytes()[offset:].splitlines() if path.exists() else ()):
        with contextlib.suppress(ValueError):  # half a line
            row = json.loads(line)
            found[(row["part"], row["case"]) if "so_far" in row else place] = row
    return list(found.values())
