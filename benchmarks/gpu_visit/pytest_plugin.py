"""A plugin of pytest for tests that may be cut: failures are reported at once, and counts are kept current.

python -m pytest -p benchmarks.gpu_visit.pytest_plugin --figures FILE --part NAME [--share I/N]
"""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.gpu_visit.figures import Figures, place_of
from benchmarks.gpu_visit.processes import die_with_parent

if TYPE_CHECKING:
    from _pytest._code import Traceback


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu-visit")
    group.addoption("--figures", type=Path, required=True, help="file of JSON lines")
    group.addoption("--part", default="tests", help="name of the part in the figures")
    group.addoption("--share", metavar="I/N", default="0/1", help="the I-th of N shares of each file's tests")


def pytest_configure(config: pytest.Config) -> None:
    die_with_parent()
    config.pluginmanager.register(Telling(config), "gpu-visit-telling")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep share I of N: every N-th test from the I-th on, with files in their order.

    Within a file the order is random, but the same in all shares. In the original order expensive tests come
    at regular distances, so that one share could get all of them.
    """
    share, shares = map(int, config.getoption("share").split("/"))
    if shares == 1:
        return
    files = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (files[item.path], zlib.crc32(item.nodeid.encode())))
    items[:] = items[share::shares]


class Telling:
    """Reports each failure at once, and counts the outcomes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.share = config.getoption("share")
        self.figures = Figures(config.getoption("figures"), config.getoption("part"))
        self.counts = Counter(passed=0, failed=0, skipped=0)
        self.collected = 0
        self.running = "the collection"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = len(session.items)
        self._count()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fails(report, "cannot be collected")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Show no dot for a test: dots of processes that write to one log would mix."""
        if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            return "passed", "", ""
        return None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running = nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._fails(report, f"fails in its {report.when}")
        elif report.when == "call" or report.skipped:
            self.counts[report.outcome] += 1
            self._count()

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._tell(f"{self.running} is cut", str(excinfo.getrepr(style="short", tbfilter=_without_pytest)))
        self.figures.write(self.running, cut=place_of(excinfo.tb))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Leave tracebacks out of the summary, which names the failures: they have been printed already."""
        self.config.option.tbstyle = "no"

    def _fails(self, report: pytest.TestReport | pytest.CollectReport, how: str) -> None:
        captured = [f"--- {title}\n{content.rstrip()}\n" for title, content in report.sections]
        self._tell(f"{report.nodeid} {how}", "\n".join([report.longreprtext.rstrip(), *captured]))
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else report.longreprtext
        self.figures.write(report.nodeid, error=(text.strip().splitlines() or [how])[0][:300])
        self.counts["failed"] += 1
        self._count()

    def _tell(self, title: str, text: str) -> None:
        """Write title and text in one piece, so that they stay together among the output of other
        processes."""
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        assert isinstance(terminal, pytest.TerminalReporter)
        terminal.write(f"\n{f' {title} ':_^100}\n{text.rstrip()}\n", flush=True)

    def _count(self) -> None:
        self.figures.write(f"share {self.share}", so_far={**self.counts, "collected": self.collected})


def _without_pytest(excinfo: pytest.ExceptionInfo[BaseException]) -> Traceback:
    own = excinfo.traceback.filter(lambda entry: not {"_pytest", "pluggy"} & {*Path(entry.path).parts})
    return own or excinfo.traceback
