"""`run_batch(dry_run=True)`: a few rows run, and the tokens and time of all rows are estimated."""

from __future__ import annotations

import dataclasses
import random

import pytest

import ramify as rm
from ramify.decisions.layouts import LAYOUTS
from ramify.errors import BackendError
from ramify.lang.batch.estimate import SAMPLE
from ramify.lang.batch.summary import cost
from ramify.messages import Usage
from tests.lang.backends import Breaking
from tests.lang.batch.batches import run

INTRODUCTION = "These are the rules of the house . " * 10


@rm.function
def ask(s, doc, question):
    s += INTRODUCTION + doc + " " + question
    s += rm.gen("answer")
    s += " And the opposite?" + rm.gen("opposite")


@rm.function
async def aask(s, doc, question):
    s += INTRODUCTION + doc + " " + question
    s += rm.gen("answer")
    s += " And the opposite?" + rm.gen("opposite")


def answer(request):
    return " word" * random.Random(str(request.prompt[0])).randrange(8, 13)


def rows_of(documents, questions):
    draw = random.Random(1)
    docs = [f"d{n} " + " ".join(f"w{draw.randrange(99)}" for _ in range(80)) for n in range(documents)]
    rows = [
        {"doc": doc, "question": f"q{n} why ?" + " ?" * draw.randrange(9)}
        for doc in docs
        for n in range(questions)
    ]
    draw.shuffle(rows)
    return rows


@pytest.mark.parametrize("program", [ask, aask], ids=["threads", "tasks"])
@pytest.mark.parametrize("shape", [(1, 200), (40, 5), (200, 1), (3, 1)])
def test_tokens_are_within_a_fifth_of_what_a_run_takes(program, shape, tmp_path):
    rows = rows_of(*shape)
    backend = rm.ScriptedBackend(answer)
    estimate = run(program, rows, dry_run=True, backend=backend)
    assert estimate.rows == len(rows)
    assert estimate.sampled == min(SAMPLE, len(rows))
    assert len(backend.requests) == 2 * estimate.sampled
    taken = run(program, rows, out=tmp_path / "out.jsonl", backend=rm.ScriptedBackend(answer)).usage
    for name in ("prompt_tokens", "completion_tokens"):
        assert getattr(estimate.usage, name) == pytest.approx(getattr(taken, name), rel=0.1), name
    computed = taken.prompt_tokens - taken.cached_tokens
    expected = estimate.usage.prompt_tokens - estimate.usage.cached_tokens
    assert expected == pytest.approx(computed, rel=0.2)


def test_nothing_is_written_and_finished_rows_do_not_count(tmp_path):
    rows, out = rows_of(2, 10), tmp_path / "out.jsonl"
    assert run(ask, rows, out=out, dry_run=True, backend=rm.ScriptedBackend(answer)).rows == 20
    assert not out.exists()
    run(ask, rows[:15], out=out, backend=rm.ScriptedBackend(answer))
    before = out.read_bytes()
    estimate = run(ask, rows, out=out, dry_run=True, backend=rm.ScriptedBackend(answer))
    assert (estimate.rows, estimate.skipped, estimate.sampled) == (5, 15, 5)
    assert out.read_bytes() == before
    assert run(ask, rows[:15], out=out, dry_run=True, backend=rm.ScriptedBackend(answer)).rows == 0


def test_the_estimate_in_words():
    text = str(run(ask, rows_of(1, 20), dry_run=True, concurrency=4, backend=rm.ScriptedBackend(answer)))
    assert text.count("--- row ") == 3
    assert "These are the rules of the house" in text
    assert "20 rows to run; estimated from 8 rows that were run, and not written" in text
    assert "s or less, 4 rows at a time" in text


@pytest.mark.parametrize("normalise", ["sum", "pmi"])
def test_the_questions_of_a_decide_are_shown_as_they_are_asked(normalise, monkeypatch):
    layout = dataclasses.replace(LAYOUTS["verbatim"], name="scripted-1")
    monkeypatch.setitem(LAYOUTS, "scripted", layout)

    @rm.function
    def sort(s, text):
        s += rm.user(text)
        s += rm.decide("team", ["billing", "returns"], "Which team?", normalise=normalise)

    backend = rm.ScriptedBackend({"team": "billing"})
    text = str(sort.run_batch([{"text": "Two charges!"}], dry_run=True, backend=backend))
    shown = text[text.index("Two charges!") :]
    assert "Which team?" in shown
    assert "- returns" in shown


def test_rows_that_fail_are_told_and_a_backend_that_fails_is_raised():
    rows = rows_of(1, 20)
    backend = Breaking(answer, BackendError("gone"), after=0, where="q3 ")
    estimate = run(ask, rows[:8], dry_run=True, backend=backend)
    assert estimate.failed == sum("q3 " in row["question"] for row in rows[:8])
    with pytest.raises(rm.ProgramError, match="All 8 rows of the sample failed"):
        run(ask, rows, dry_run=True, backend=Breaking(answer, BackendError("gone"), after=0))


def test_cost():
    usage = Usage(prompt_tokens=3_000_000, cached_tokens=2_000_000, completion_tokens=500_000)
    assert cost(usage, (1.0, 0.1, 4.0)) == pytest.approx(1.0 + 0.2 + 2.0)
