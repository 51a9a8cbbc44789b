"""The driver of a visit to a GPU: parts that fail, crash, are cut or leave processes, without a GPU.

Time stands still until a part says that it is ready; so a part is always cut where it waits.
"""

from __future__ import annotations

import io
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_visit import __main__ as command
from benchmarks.gpu_visit.calls import CALLS, Part
from benchmarks.gpu_visit.driver import LEAST_S, Call, Ended, Grace, rows_of
from benchmarks.gpu_visit.parts import engine_tests, kernel_tests
from benchmarks.gpu_visit.processes import Started
from benchmarks.gpu_visit.table import table
from tests.gpu import test_engine as gpu_engine_tests
from tests.gpu import toy

ROOT = Path(__file__).parents[2]
EVER = Grace(1e9, 1e9)

pytestmark = pytest.mark.slow

READY = "import pathlib; ready = pathlib.Path({ready!r}).touch\n"
PARTS = {
    "passes": "def run(figures): figures.add('case', ratio=1.5, of='torch')",
    "fails": """
        def run(figures):
            with figures.attempt("first"):
                raise ValueError("a wrong number")
            figures.add("second", of_ceiling=0.9)
            raise RuntimeError("a part that breaks")
    """,
    "crashes": "import os, signal\ndef run(figures): os.kill(os.getpid(), signal.SIGSEGV)",
    "loops": """
        def run(figures):
            figures.add("before", tokens_s=7.0)
            ready()
            while True: pass  # the loop
    """,
    "stuck": """
        import ctypes, signal
        def run(figures):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            ready()
            ctypes.PyDLL(None).pause()  # inside C
    """,
    "deaf": """
        import signal
        def run(figures):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGABRT})
            print("half a line", end="", flush=True)
            figures.path.open("a").write('{"part": "visit_parts.de')
            ready()
            signal.pause()
    """,
    "says_much": "def run(figures): [print(f'line {number:05}') for number in range(20000)]",
}


def write_part(tmp_path: Path, name: str, text: str) -> None:
    folder = tmp_path / "visit_parts"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(READY.format(ready=str(tmp_path / "ready")) + textwrap.dedent(text))


class Visit:
    """A call in a folder of its own, whose time begins to run, a second a look, when `ready` exists."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path, self.out, self.terminal = tmp_path, tmp_path / "out", io.BytesIO()
        self.now = 0.0
        self.at_ready: Callable[[], object] = lambda: None

    def clock(self) -> float:
        if (self.tmp_path / "ready").exists():
            if not self.now:
                self.at_ready()
            self.now += 1.0
        return self.now

    def run(
        self, *names: str, seconds: float | None = None, grace: Grace = EVER, **options: Any
    ) -> list[Ended]:
        """Parts that wait to be cut have a second unless `seconds` says otherwise, others any time."""
        parts = []
        for name in names:
            if name in PARTS:
                write_part(self.tmp_path, name, PARTS[name])
            own = seconds or (1.0 if "ready()" in (self.file(name)).read_text() else 1e9)
            parts.append(Part(f"visit_parts.{name}", own, f"a part that {name}"))
        options = {"clock": self.clock, "at_its_limit": grace, "terminal": self.terminal} | options
        with Call("A", self.out, **options) as call:
            return list(call.run(parts))

    def file(self, name: str) -> Path:
        return self.tmp_path / "visit_parts" / f"{name}.py"

    def line(self, name: str, text: str) -> int:
        lines = self.file(name).read_text().splitlines()
        return next(number for number, line in enumerate(lines, 1) if text in line)

    @property
    def log(self) -> str:
        return (self.out / "A.log").read_text()

    def rows(self, name: str) -> dict[str, dict[str, Any]]:
        found = rows_of(self.out / "A.jsonl")
        return {row["case"]: row for row in found if row["part"] == f"visit_parts.{name}"}


@pytest.fixture
def visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Visit:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return Visit(tmp_path)


@pytest.fixture
def read_held(tmp_path: Path) -> Iterator[Callable[[], bytes]]:
    """A named pipe `held`. Called: a byte from it; none as soon as all who held its other end are gone."""
    os.mkfifo(tmp_path / "held")
    end = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)

    def read() -> bytes:
        assert select.select([end], [], [], 60.0)[0], "somebody still holds the pipe"
        return os.read(end, 1)

    yield read
    os.close(end)


def test_a_part_that_fails_or_crashes_stops_no_other(visit: Visit) -> None:
    fails, crashes, passes = visit.run("fails", "crashes", "passes")
    assert fails.outcome == "2 cases failed"
    assert crashes.outcome == "crashed by SIGSEGV"
    assert passes.outcome == "passed"
    assert visit.rows("fails")["first"]["error"] == "ValueError: a wrong number"
    assert visit.rows("fails")["second"]["of_ceiling"] == 0.9
    assert visit.rows("fails")["outcome"]["outcome"] == "2 cases failed"
    for text in ('raise RuntimeError("a part that breaks")', "Segmentation fault", "crashes.py"):
        assert text in visit.log
    assert visit.terminal.getvalue().decode() == visit.log
    assert sorted(path.name for path in visit.out.iterdir()) == ["A.jsonl", "A.log"]


def test_a_part_that_is_cut_tells_its_line(visit: Visit) -> None:
    loops, passes = visit.run("loops", "passes")
    assert (loops.outcome, passes.outcome) == ("cut at its limit by SIGINT", "passed")
    assert "while True: pass  # the loop" in visit.log
    assert "KeyboardInterrupt" in visit.log
    assert visit.rows("loops")["before"]["tokens_s"] == 7.0
    place = f"loops.py:{visit.line('loops', '# the loop')}"
    assert place in visit.rows("loops")["the part itself"]["cut"]


def test_a_part_that_is_stuck_in_c_shows_its_stack(visit: Visit) -> None:
    (stuck,) = visit.run("stuck", grace=Grace(3.0, 1e9))
    assert stuck.outcome == "cut at its limit by SIGABRT"
    assert "Fatal Python error: Aborted" in visit.log
    assert f'stuck.py", line {visit.line("stuck", "# inside C")} in run' in visit.log


def test_a_part_that_hears_nothing_is_killed(visit: Visit) -> None:
    deaf, passes = visit.run("deaf", "passes", grace=Grace(3.0, 3.0))
    assert (deaf.outcome, passes.outcome) == ("cut at its limit by SIGKILL", "passed")
    assert visit.rows("passes")["case"]["ratio"] == 1.5  # the row after half a line
    assert visit.rows("deaf")["outcome"]["outcome"] == deaf.outcome
    assert "half a line\n--- SIGINT\n" in visit.log


@pytest.mark.parametrize("end", ["pass", "ready(); signal.pause()"])
def test_nothing_that_a_part_starts_is_left(
    visit: Visit, tmp_path: Path, end: str, read_held: Callable[[], bytes]
) -> None:
    write_part(
        tmp_path,
        "leaves",
        f"""
        import signal, subprocess
        def run(figures):
            held = open({str(tmp_path / "held")!r}, "wb")
            for own_session in (False, True):
                subprocess.Popen(["sleep", "1000"], stdout=held, start_new_session=own_session)
            {end}
        """,
    )
    (leaves,) = visit.run("leaves")
    assert leaves.outcome == ("passed" if end == "pass" else "cut at its limit by SIGINT")
    assert read_held() == b""


DYING = """
import ctypes, pathlib, platform, sys, threading
def wait():
    stat = pathlib.Path("/proc/self/stat")
    while stat.read_bytes().rpartition(b")")[2].split()[0] != b"Z": pass
    print("ready", flush=True)
    sys.stdin.read()
threading.Thread(target=wait).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit(2), of this thread
"""


def test_a_process_lives_until_its_last_thread_has_closed_its_files() -> None:
    """The first thread is gone, and with it /proc/PID/environ; the other one holds what is open."""
    with subprocess.Popen(
        [sys.executable, "-c", DYING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        started = Started(process.pid, "a mark")
        assert started.look() == []
        assert started.living() == [process.pid]
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert started.living() == [], "a zombie"


@pytest.mark.parametrize(("taken", "limits"), [(30.0, [100.0, 170.0, 240.0]), (117.0, [100.0, 83.0, 66.0])])
def test_time_that_is_left_or_lacking_is_passed_on(
    visit: Visit, tmp_path: Path, taken: float, limits: list[float]
) -> None:
    for name in ("one", "two", "three"):
        text = f"def run(figures): open({str(tmp_path / 'done')!r}, 'a').write('x'); "
        write_part(tmp_path, name, text + "figures.add('given', given_s=figures.seconds)")

    def seconds() -> float:
        done = tmp_path / "done"
        return taken * done.stat().st_size if done.exists() else 0.0

    visit.run("one", "two", "three", seconds=100.0, clock=seconds)
    rows = [visit.rows(name) for name in ("one", "two", "three")]
    assert [row["outcome"]["limit_s"] for row in rows] == limits
    assert [row["given"]["given_s"] for row in rows] == limits, "the part knows it too"


def test_a_part_that_is_left_no_time_has_a_little(visit: Visit, tmp_path: Path) -> None:
    for name in ("one", "two"):
        text = f"def run(figures): open({str(tmp_path / 'done')!r}, 'a').write('x')"
        write_part(tmp_path, name, text)
    visit.run("one", "two", seconds=10.0, clock=lambda: 99.0 * (tmp_path / "done").exists())
    assert [visit.rows(name)["outcome"]["limit_s"] for name in ("one", "two")] == [10.0, LEAST_S]


def test_an_interrupted_visit_stops_its_part_and_tells_how_all_ended(visit: Visit) -> None:
    visit.at_ready = lambda: os.kill(os.getpid(), signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    ended = visit.run("loops", "passes", seconds=1e9, grace=Grace(0.0, 0.0), at_our_end=EVER)
    assert [part.outcome for part in ended] == [
        "cut, as the visit was stopped, by SIGINT",
        "not begun: the visit was stopped",
    ]
    assert "while True: pass  # the loop" in visit.log
    assert signal.getsignal(signal.SIGTERM) is before
    assert "not begun" in table("A", ended)


DRIVER = """
import pathlib, sys
from benchmarks.gpu_visit.calls import Part
from benchmarks.gpu_visit.driver import Call
with Call("A", pathlib.Path(sys.argv[1])) as call:
    list(call.run([Part("visit_parts.waits", 1e9, "waits")]))
"""


def test_a_part_whose_driver_is_killed_still_shows_its_stack(
    visit: Visit, tmp_path: Path, read_held: Callable[[], bytes]
) -> None:
    write_part(
        tmp_path,
        "waits",
        f"""
        import signal
        def run(figures):
            held = open({str(tmp_path / "held")!r}, "wb", buffering=0)
            held.write(b"x")
            signal.pause()
        """,
    )
    with subprocess.Popen([sys.executable, "-c", DRIVER, visit.out], stdout=subprocess.DEVNULL) as driver:
        try:
            assert read_held() == b"x"
        finally:
            driver.kill()
    assert read_held() == b""
    assert "Fatal Python error: Aborted" in visit.log


def test_a_long_log_keeps_its_beginning_and_its_end(visit: Visit) -> None:
    most = 64 << 10
    visit.run("says_much", most=most)
    assert len(visit.log.encode()) < most
    assert "a part that says_much" in visit.log
    assert "line 00000\n" in visit.log
    assert "bytes left out" in visit.log
    assert "line 19999\n" in visit.log
    assert visit.log.splitlines()[-1].startswith("--- visit_parts.says_much: passed")


TESTS = """
import pathlib, signal
def test_good(): pass
def test_bad():
    print("said before")
    number = 3
    assert number == 4
def test_that_waits():
    signal.pthread_sigmask(signal.SIG_BLOCK, {blocked})
    pathlib.Path({ready!r}).touch()
    while True: pass  # in the test
"""


@pytest.mark.parametrize("deaf", [False, True])
def test_pytest_tells_a_failure_at_once(visit: Visit, tmp_path: Path, deaf: bool) -> None:
    tests = tmp_path / "test_some.py"
    blocked = "{signal.SIGINT, signal.SIGABRT}" if deaf else "()"
    tests.write_text(TESTS.format(blocked=blocked, ready=str(tmp_path / "ready")))
    text = "from benchmarks.gpu_visit.pytest_runs import run_tests\n"
    write_part(tmp_path, "tests", f"{text}def run(figures): run_tests(figures, [{str(tests)!r}])")
    (ended,) = visit.run("tests", seconds=1.0, grace=Grace(3.0, 3.0) if deaf else EVER)
    assert ended.outcome == f"cut at its limit by {'SIGABRT' if deaf else 'SIGINT'}"
    assert visit.log.count("assert number == 4") == 1
    assert "said before" in visit.log
    assert ("in the test" in visit.log) == ("1 failed, 1 passed" in visit.log) == (not deaf)
    rows = visit.rows("tests")
    bad = next(row for case, row in rows.items() if case.endswith("test_bad"))
    assert bad["error"] == "assert 3 == 4"
    assert rows["share 0/1"]["so_far"] == {"passed": 1, "failed": 1, "skipped": 0, "collected": 3}
    if not deaf:
        waiting = next(row for case, row in rows.items() if case.endswith("test_that_waits"))
        assert waiting["cut"].endswith("test_some.py:11)")
        assert "pluggy" not in visit.log
    text = table("A", [ended])
    assert "1 passed, 1 failed, 0 skipped, 3 collected" in text
    assert re.search(r"^  test_some.py::test_bad +FAILED assert 3 == 4$", text, re.MULTILINE)


def test_shares_run_each_test_once_and_part_of_each_file(visit: Visit, tmp_path: Path) -> None:
    files = [tmp_path / f"test_{name}.py" for name in ("first", "second")]
    for path in files:
        path.write_text(
            "import pathlib, os, pytest\n"
            "@pytest.mark.parametrize('number', range(9))\n"
            f"def test(number): (pathlib.Path({str(tmp_path)!r}) / f'{path.stem} {{number}} {{os.getpid()}}')"
            ".touch(exist_ok=False)\n"
        )
    files[1].write_text(files[1].read_text() + "def test_last(): os._exit(3)\n")
    text = "from benchmarks.gpu_visit.pytest_runs import run_tests\n"
    names = [str(path) for path in files]
    write_part(tmp_path, "tests", f"{text}def run(figures): run_tests(figures, {names}, shares=3)")
    (ended,) = visit.run("tests", seconds=1e9)
    assert ended.outcome == "1 case failed"
    assert [row["error"] for row in ended.rows if "error" in row] == ["pytest ended with status 3"]
    ran = [tuple(path.name.split()) for path in tmp_path.glob("test_* * *")]
    first = [(number, process) for stem, number, process in ran if stem == "test_first"]
    assert sorted(number for number, _ in first) == sorted(map(str, range(9)))
    assert len({process for _, process in first}) == 3
    assert all(sum(process == own for _, own in first) == 3 for _, process in first)
    assert len({number for stem, number, _ in ran if stem == "test_second"}) >= 6


def test_the_table_names_the_device_and_every_main_figure() -> None:
    def row(case: str, **values: Any) -> dict[str, Any]:
        return {"part": "engine", "case": case, **values}

    rows = [
        row("versions", torch="2.11", date="some day"),
        row("device", device="some card"),
        row("decode", of_ceiling=0.91, of_roofline=0.8, seconds=0.1),
        row("cascade", ratio=5.2, of="without it", tokens_s=900.4),
        row("broken", error="ValueError: no\nmore lines"),
        row("plain", seconds=0.2),
        *(row(f"many {number}", ratio=1.0) for number in range(40)),
    ]
    lines = table("B", [Ended(Part("engine", 5, "x"), "1 case failed", 4.4, rows)]).splitlines()
    assert lines[1] == "B: device some card, torch 2.11, date some day"
    assert lines[2].split() == ["engine", "1", "case", "failed,", "4", "s"]
    assert lines[3].endswith("91% of ceiling, 80% of roofline")
    assert lines[4].endswith("5.20x without it, 900 tokens/s")
    assert lines[5].endswith("FAILED ValueError: no")
    assert lines[-1] == "  … and 19 more in B.jsonl"
    assert not any("plain" in line for line in lines)


def test_calls_take_the_seconds_that_they_are_given() -> None:
    for name, parts in CALLS.items():
        own = sum(part.seconds for part in parts)
        assert own <= {"A": 150, "B": 260, "C": 205, "D": 180}[name]
        assert command.parts_of(name, None, None, tiny=False) == list(parts)
        assert sum(part.seconds for part in command.parts_of(name, None, 60, tiny=True)) == pytest.approx(60)
        assert sum(part.seconds for part in command.parts_of(name, None, None, tiny=True)) == 10 * own
    (twins,) = command.parts_of("A", ["twins"], 7, tiny=False)
    assert (twins.name, twins.seconds) == ("twins", pytest.approx(7))
    assert command.parts_of("B", ["twins"], 7, tiny=False) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "serve"], "--only serve: call A or C has no such part"),
        (["--seconds", "0"], "--seconds 0: a call needs more than 0 seconds"),
    ],
)
def test_what_would_run_nothing_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["A", "C", "--tiny", *options])
    assert said in capsys.readouterr().err


def test_without_a_device_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["A", "--out", str(tmp_path)]) == 2
    assert "needs a CUDA device, and torch finds none" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_all_parts_share_the_engines_cache_of_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path))
    found = []

    class Idle(Call):
        def run(self, parts: Sequence[Part]) -> Iterator[Ended]:
            found.append(os.environ.get("TRITON_CACHE_DIR"))
            return iter(())

    monkeypatch.setattr(command, "Call", Idle)
    assert command.main(["A", "--tiny", "--out", str(tmp_path / "out")]) == 0
    assert found == [str(tmp_path / "triton")]


def test_every_test_of_the_gpu_is_in_one_of_two_parts() -> None:
    tests = [*kernel_tests.files(), *engine_tests.TESTS]
    assert sorted(tests) == sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py")
    )


@pytest.mark.parametrize("options", [*gpu_engine_tests.OPTIONS, {"memory_fraction": 0.5}], ids=str)
def test_the_engine_tests_check_few_pages(options: dict[str, Any]) -> None:
    """A check goes over all pages after every step, and a large card holds millions of a toy model's."""
    config = toy.config_of(**options)
    assert not config.check_pages or (config.num_pages or 1 << 30) <= 1 << 14
