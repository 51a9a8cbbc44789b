"""Fixtures for pytest, in every project that has Ramify installed: `ramify_replay` and `ramify_backend`.

The first run of a test whose backend is `ramify_replay` records the answers of `ramify_backend`. Later runs
replay the recording.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ramify.lang.backends.base import Backend

FOLDER = "recordings"
OPTION = "--ramify-record"

_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "Record anew what the backends of tests with `ramify_replay` answer."
    parser.getgroup("ramify").addoption(OPTION, action="store_true", help=words)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture
def ramify_backend() -> Backend:
    """The backend that `ramify_replay` records. A project must define its own fixture of this name, of any
    scope, in a conftest.py."""
    pytest.fail(
        "There is no backend to record. Define a fixture ramify_backend in conftest.py, which returns an "
        "Engine or a RuntimeEndpoint.",
        pytrace=False,
    )


@pytest.fixture
def ramify_replay(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend that answers as `ramify_backend` did when the test was recorded.

    The recording is ``recordings/<module>/<test>.jsonl`` beside the test. The recording is made if it is
    missing, and made again with ``--ramify-record``. A new recording is kept only if the test passes. If the
    environment variable CI is set, a missing recording fails the test. A request that was not recorded ends
    the run with `ramify.NotRecorded`, which shows how the request differs from the recorded requests.
    """
    from ramify.lang.backends.replay import RecordingBackend, ReplayBackend

    path = recording_of(request.node)
    wanted = request.config.getoption(OPTION)
    if path.exists() and not wanted:
        replay = ReplayBackend(path)
        replay.remedy = f"Record it again: pytest {OPTION}."
        yield replay
        return
    if not wanted and os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(
            f"There is no recording {path}, and CI is set. Run the test where CI is not set, and commit the "
            f"file; or give {OPTION}.",
            pytrace=False,
        )
    backend = request.getfixturevalue("ramify_backend")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.new")
    yield RecordingBackend(backend, unfinished)
    if request.node.stash.get(_PASSED, False) and unfinished.stat().st_size:
        unfinished.replace(path)
    else:
        unfinished.unlink()


def recording_of(test: pytest.Item) -> Path:
    """The path of a test's recording. If the test's name cannot be a file name, the file name ends in a
    hash."""
    name = ".".join(test.nodeid.split("::")[1:])
    plain = re.sub(r"[^\w.\[\]-]", "_", name)[:100]
    if plain != name:
        plain += f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return test.path.parent / FOLDER / test.path.stem / f"{plain}.jsonl"
