"""Runs of pytest within a part: tests shared out among processes, each of which reports its failures at
once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.gpu_visit.driver import rows_of
from benchmarks.gpu_visit.figures import Figures

OPTIONS = [
    "-q",
    "-p",
    "no:cacheprovider",
    "-W",
    "default",
    "--maxfail=20",
    "--durations=5",
    "-o",
    "pythonpath=",
]
"""Options of pytest. Two of them undo settings of pyproject.toml. `filterwarnings = error`: deprecations of
the host's libraries are not our errors. `pythonpath = .`: the clone's folder ramify would precede a package
installed elsewhere."""
NO_TESTS = 5
"""Exit status of pytest for a share without tests."""


def run_tests(figures: Figures, tests: Sequence[str], shares: int = 1) -> None:
    """Run the tests. A failing test gets a row with `error`; so does a process that ends abnormally."""
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", *OPTIONS, *tests]
    command += ["-p", "benchmarks.gpu_visit.pytest_plugin", "--part", figures.part]
    command += ["--figures", str(figures.path.absolute())]
    began = figures.path.stat().st_size if figures.path.exists() else 0
    started = [
        subprocess.Popen([*command, "--share", f"{share}/{shares}"], stdin=subprocess.DEVNULL)
        for share in range(shares)
    ]
    try:
        for process in started:
            process.wait()
    except KeyboardInterrupt:
        # They are in this process group, so they are interrupted too, and print their summaries.
        for process in started:
            process.wait()
        raise
    told = [row for row in rows_of(figures.path, began) if row["part"] == figures.part and "error" in row]
    figures.failures += len(told)
    for share, process in enumerate(started):
        if process.returncode in (0, NO_TESTS) or (process.returncode == 1 and told):
            continue
        figures.failures += 1
        figures.add(f"share {share} of {shares}", error=f"pytest ended with {_named(process.returncode)}")


def _named(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"
