"""The fixture `ramify_replay`, in pytest runs of its own."""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from ramify.lang.backends.replay import ReplayBackend

pytest_plugins = ["pytester"]

PLUGIN = "ramify.lang.pytest_plugin"
INSTALLED = any(point.value == PLUGIN for point in entry_points(group="pytest11"))

CONFTEST = """
import pytest
import ramify as rm

@pytest.fixture(scope="session")
def ramify_backend():
    print("A model was loaded.")
    return rm.ScriptedBackend(lambda request: "Paris")
"""
TESTS = """
import pytest
import ramify as rm

@rm.function
def capital(s, country):
    s += rm.user(f"The capital of {country}?") + rm.assistant(rm.gen("city"))

@pytest.mark.parametrize("country", ["France", "Côte d'Or/21"])
def test_capital(ramify_replay, country):
    assert capital.run(country, backend=ramify_replay)["city"] == "Paris"
    assert ramify_replay.unused == []

class TestOthers:
    async def test_caught(self, ramify_replay):
        state = capital.run("Italy", backend=ramify_replay)
        if state.error() is None:
            assert state["city"] == "Paris"
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("CI", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_capital=TESTS)
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function")
    return pytester


def run(project: pytest.Pytester, *options: str) -> pytest.RunResult:
    plugin = () if INSTALLED else ("-p", PLUGIN)
    return project.runpytest_subprocess(*plugin, "-rA", *options)


def recordings(project: pytest.Pytester) -> list[Path]:
    return sorted(project.path.glob("recordings/test_capital/*"))


def test_pytest_finds_the_plugin() -> None:
    config = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert config["project"]["entry-points"]["pytest11"] == {"ramify": PLUGIN}


def test_a_test_is_recorded_once_and_replayed(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(project)
    first.assert_outcomes(passed=3)
    assert "A model was loaded." in first.stdout.str()
    names = [path.name for path in recordings(project)]
    assert names[:2] == ["TestOthers.test_caught.jsonl", names[1]]
    assert names[2] == "test_capital[France].jsonl"
    assert names[1].startswith("test_capital[C")
    assert len(ReplayBackend(recordings(project)[0]).unused) == 1

    monkeypatch.setenv("CI", "true")
    again = run(project)
    again.assert_outcomes(passed=3)
    assert "A model was loaded." not in again.stdout.str()


@pytest.mark.slow
def test_another_request_fails_with_the_difference(project: pytest.Pytester) -> None:
    run(project).assert_outcomes(passed=3)
    before = [path.read_bytes() for path in recordings(project)]
    project.makepyfile(test_capital=TESTS.replace("The capital", "The main town"))
    changed = run(project)
    changed.assert_outcomes(failed=3)  # also the test that recovers from errors
    output = changed.stdout.str()
    assert "it continues with 'main town of France?" in output
    assert "recorded was 'capital of France?" in output
    assert "Record it again: pytest --ramify-record." in output
    assert "it continues with 'main town of Italy?" in output
    assert "A model was loaded." not in output

    run(project, "--ramify-record", "-k", "France").assert_outcomes(passed=1, deselected=2)
    assert [path.read_bytes() == old for path, old in zip(recordings(project), before, strict=True)] == [
        True,
        True,
        False,
    ]


@pytest.mark.slow
def test_a_recording_is_kept_only_if_the_test_passes(project: pytest.Pytester) -> None:
    project.makepyfile(test_capital=TESTS.replace('== "Paris"', '== "London"'))
    run(project, "-k", "France").assert_outcomes(failed=1, deselected=2)
    assert recordings(project) == []


@pytest.mark.slow
@pytest.mark.parametrize("ci", ["true", "false"])
def test_nothing_is_recorded_in_ci(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str
) -> None:
    monkeypatch.setenv("CI", ci)
    found = run(project, "-k", "France")
    found.assert_outcomes(**({"errors": 1} if ci == "true" else {"passed": 1}), deselected=2)
    if ci == "true":
        assert "test_capital[France].jsonl, and CI is set." in found.stdout.str()
        run(project, "-k", "France", "--ramify-record").assert_outcomes(passed=1, deselected=2)


@pytest.mark.slow
def test_without_a_backend_it_says_what_to_define(project: pytest.Pytester) -> None:
    project.makeconftest("")
    found = run(project, "-k", "France")
    found.assert_outcomes(errors=1, deselected=2)
    assert "Define a fixture ramify_backend in conftest.py" in found.stdout.str()
