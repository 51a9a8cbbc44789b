"""Relations between the answers to related requests, on real weights over ``/v1/systemone``.

They are those of jevbench (PyPI): groups BAT (the other questions of a request), REP (another form of the
same question) and CHO (a smaller menu). All hold exactly. Its own cases are run by ``jevbench eval --url
URL/v1/systemone --model default --dimensions BAT --tolerance 0``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.end_to_end.served import Served, serve

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(300)]

STATES = (
    "Order 7 arrived broken yesterday. I paid 30 euros, and I want my money back before Friday.",
    {"alert": "disk full", "host": "db-3", "minutes": 12, "paged": ["ops", "storage"]},
)
QUESTIONS: dict[str, dict[str, Any]] = {
    "urgent": {"type": "noul", "instructions": "Is it urgent?"},
    "money": {
        "type": "noul",
        "instructions": "Is it about money?",
        "criteria": {"true": "a price, a payment or a refund", "false": "anything else"},
    },
    "team": {
        "type": "choice",
        "instructions": "Which team handles it?",
        "criteria": {
            "billing": "invoices and refunds",
            "returns": None,
            "storage": "disks and databases",
            "return shipments": "parcels on their way back",
        },
    },
    "tone": {
        "type": "choice",
        "instructions": "What tone has it?",
        "criteria": {"calm": None, "angry": None},
    },
    "weight": {
        "type": "score",
        "instructions": "How grave is it?",
        "criteria": ["can wait", "needs attention", "must be done at once"],
    },
}
FILLERS = (
    "Is it longer than one sentence?",
    "Does it mention a colour?",
    "Does it name a city?",
    "Is it a poem?",
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--page-size", "16", "--deterministic") as served:
        yield served


@pytest.fixture(params=STATES, ids=["text", "object"])
def state(request: pytest.FixtureRequest) -> Any:
    return request.param


def ask(served: Served, state: Any, questions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Name → answer."""
    body = {"model": "default", "state": state, "questions": questions, **fields}
    found = httpx.post(served.url + "/v1/systemone", json=body, timeout=120)
    assert found.status_code == 200, found.text
    answers: dict[str, Any] = found.json()["answers"]
    assert list(answers) == list(questions)
    return answers


def test_the_other_questions_of_a_request_change_no_bit(served: Served, state: Any) -> None:
    base = ask(served, state, QUESTIONS)
    assert len({str(answer) for answer in base.values()}) == len(base)
    httpx.post(served.url + "/flush_cache")
    assert ask(served, state, QUESTIONS) == base
    assert ask(served, state, dict(reversed(QUESTIONS.items()))) == base
    for size in (1, 2, 4):
        assert ask(served, state, dict([*QUESTIONS.items()][:size])).items() <= base.items()
    for name, question in QUESTIONS.items():
        assert ask(served, state, {name: question})[name] == base[name]
        twice = ask(served, state, QUESTIONS | {"copy": question})
        assert twice["copy"] == twice[name] == base[name]
        others = {f"other {at}": {"type": "noul", "instructions": text} for at, text in enumerate(FILLERS)}
        assert ask(served, state, others | {name: question})[name] == base[name]


def test_names_of_questions_change_no_bit(served: Served, state: Any) -> None:
    base = ask(served, state, QUESTIONS)
    names = {name: (f"q_{at:06x}", f"not {name}") for at, name in enumerate(QUESTIONS)}
    for at in (0, 1):
        renamed = ask(served, state, {names[name][at]: question for name, question in QUESTIONS.items()})
        assert {name: renamed[names[name][at]] for name in QUESTIONS} == base


def test_another_state_changes_the_answers(served: Served) -> None:
    one, other = (ask(served, state, QUESTIONS) for state in STATES)
    assert all(one[name] != other[name] for name in QUESTIONS)


def test_isolated_options_do_not_know_each_other(served: Served, state: Any) -> None:
    """Their order changes no probability, and a smaller menu divides by a smaller sum."""
    team = QUESTIONS["team"]
    base = ask(served, state, {"team": team}, layout="isolated")["team"]["probabilities"]
    assert len(set(base.values())) == len(base)
    criteria = team["criteria"]
    turned = team | {"criteria": dict(reversed(criteria.items()))}
    found = ask(served, state, {"team": turned}, layout="isolated")["team"]["probabilities"]
    assert found == pytest.approx(base, rel=1e-12)
    for pair in (("billing", "storage"), ("returns", "return shipments")):
        menu = team | {"criteria": {name: criteria[name] for name in pair}}
        found = ask(served, state, {"team": menu}, layout="isolated")["team"]["probabilities"]
        total = sum(base[name] for name in pair)
        assert found == pytest.approx({name: base[name] / total for name in pair}, rel=1e-12)


def test_all_rotations_of_the_options_are_one_average(served: Served, state: Any) -> None:
    team = QUESTIONS["team"]
    names = list(team["criteria"])
    asked = {
        first: team | {"criteria": {name: team["criteria"][name] for name in names[at:] + names[:at]}}
        for at, first in enumerate(names)
    }
    plain, averaged = (ask(served, state, asked, permutations=count) for count in (1, len(names)))
    base = averaged[names[0]]["probabilities"]
    for answer in averaged.values():
        assert answer["probabilities"] == pytest.approx(base, rel=1e-12)
    assert any(plain[name]["probabilities"] != pytest.approx(base) for name in names)
