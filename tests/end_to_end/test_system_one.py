"""``/v1/systemone`` on real weights: beside other clients, and when a client or the engine core goes away."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.end_to_end.served import Served, serve

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(300)]

STATE = "Order 7 arrived broken on Monday. The customer wants the money back and asks for a call. " * 4
KINDS: Any = [
    {"type": "noul", "instructions": "Is the customer angry?"},
    {
        "type": "choice",
        "instructions": "Which team?",
        "criteria": {"returns": "broken goods", "sale": None, "sales": None},
    },
    {"type": "score", "instructions": "How urgent?", "criteria": ["can wait", "this week", "today"]},
]
OPENAIS: Any = [
    {"type": "predicate", "instructions": "Is the customer angry?"},
    {
        "type": "choice",
        "instructions": "Which team?",
        "choices": [
            {"value": "returns", "description": "broken goods"},
            {"value": "sale"},
            {"value": "sales"},
        ],
    },
    {
        "type": "score",
        "instructions": "How urgent?",
        "levels": [
            {"label": "0", "description": "can wait"},
            {"label": "1", "description": "this week"},
            {"label": "2", "description": "today"},
        ],
    },
]
"""`KINDS` in OpenAI's form."""


def numbered(questions: list[Any], count: int) -> list[Any]:
    """`count` questions, each with another text."""
    return [
        one | {"instructions": f"{index}. {one['instructions']}"}
        for index, one in enumerate(questions * count, start=1)
    ][:count]


QUESTIONS = {f"q{index}": one for index, one in enumerate(numbered(KINDS, 18))}
MANY = {f"q{index}": one for index, one in enumerate(numbered(KINDS, 400))}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--deterministic") as served:
        yield served


def ask(served: Served, questions: Any, timeout: float = 200, state: str = STATE) -> Any:
    body = {"model": "jev-latest", "state": state, "questions": questions}
    answer = httpx.post(served.url + "/v1/systemone", json=body, timeout=timeout)
    assert answer.status_code == 200, answer.text
    return answer.json()["answers"]


@pytest.fixture
def talking(served: Served) -> Iterator[Callable[[], int]]:
    """A client that has texts generated during the test. The function gives their number so far."""
    stop, texts = threading.Event(), 0

    def talk() -> None:
        nonlocal texts
        while not stop.is_set():
            body = {"model": "default", "prompt": f"Story {texts}:", "max_tokens": 16}
            httpx.post(served.url + "/v1/completions", json=body, timeout=200).raise_for_status()
            texts += 1

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield lambda: texts
    finally:
        stop.set()
        thread.join()


def gauges(served: Served) -> dict[str, float]:
    lines = httpx.get(served.url + "/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def wait_until_idle(served: Served) -> None:
    names = ("ramify_num_requests_running", "ramify_num_requests_waiting", 'ramify_kv_pages{state="in_use"}')
    ends = time.monotonic() + 60
    while any(found := [gauges(served)[name] for name in names]):
        assert time.monotonic() < ends, found
        time.sleep(0.1)


def test_the_same_numbers_beside_other_clients(served: Served, talking: Callable[[], int]) -> None:
    together = ask(served, QUESTIONS)
    alone = [ask(served, {name: question}) for name, question in QUESTIONS.items()]
    assert {name: one[name] for one, name in zip(alone, QUESTIONS, strict=True)} == together
    pairs = list(QUESTIONS.items())
    with ThreadPoolExecutor(6) as pool:
        parts = pool.map(lambda start: ask(served, dict(pairs[start : start + 3])), range(0, 18, 3))
        assert {name: one for part in parts for name, one in part.items()} == together
    assert talking() > 0


def test_both_forms_have_the_same_numbers(served: Served) -> None:
    body = {"model": "default", "input": STATE, "questions": numbered(OPENAIS, 18)}
    answer = httpx.post(served.url + "/v1/decisions", json=body, timeout=200)
    for mine, theirs in zip(ask(served, QUESTIONS).values(), answer.json()["answers"], strict=True):
        assert mine["option_mass"] == theirs["option_mass"]
        if theirs["type"] == "predicate":
            assert mine["noul"] == theirs["probability"]
        else:
            assert [*mine["probabilities"].values()] == [
                one["probability"] for one in theirs["probabilities"]
            ]
            assert mine["confidence"] == theirs["confidence"]


@pytest.mark.parametrize("seconds", [0.3, 3.0])
def test_a_client_that_goes_away_leaves_nothing_behind(served: Served, seconds: float) -> None:
    with contextlib.suppress(httpx.ReadTimeout):  # a fast machine may answer before
        ask(served, MANY, timeout=seconds, state=f"{seconds} {STATE}")
    wait_until_idle(served)


def test_a_state_that_is_too_long(served: Served) -> None:
    body = {"model": "default", "state": "word " * 9000, "questions": QUESTIONS}
    answer = httpx.post(served.url + "/v1/systemone", json=body)
    assert answer.status_code == 413
    assert re.search(r"length is 8192 tokens\..* resulted in 90\d\d tokens", answer.json()["detail"])


def test_an_engine_core_that_dies(served: Served) -> None:
    """The request begins again in the new core, and has the same answers."""
    some = dict([*MANY.items()][:100])
    expected = ask(served, some)
    with ThreadPoolExecutor(1) as pool:
        httpx.post(served.url + "/flush_cache")
        answers = pool.submit(ask, served, some)
        while not gauges(served)["ramify_num_requests_running"]:
            time.sleep(0.05)
        os.kill(scheduler_of(served), signal.SIGKILL)
        assert answers.result() == expected
    assert any("restarting the engine core" in line for line in served.lines)
    wait_until_idle(served)


def scheduler_of(served: Served) -> int:
    """The process that runs the model."""
    pid = served.process.pid
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        for child in children.read().split():
            with open(f"/proc/{child}/cmdline") as command:
                if "scheduler.process" in command.read():
                    return int(child)
    raise AssertionError("no scheduler")
