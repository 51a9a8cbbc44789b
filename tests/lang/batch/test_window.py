"""The order in which a batch runs its rows: rows with a common prefix run together."""

from __future__ import annotations

import itertools
import random

import ramify as rm
from ramify.lang.batch.window import SAMPLE_ROWS, Row, Window


def shuffled(documents, questions):
    pairs = [{"question": f"q{q}", "doc": f"d{d}"} for d in range(documents) for q in range(questions)]
    random.Random(1).shuffle(pairs)
    return [Row(index, values) for index, values in enumerate(pairs)]


def changes(rows):
    docs = [row.values["doc"] for row in rows]
    return sum(one != other for one, other in itertools.pairwise(docs))


def test_a_window_brings_rows_of_one_prefix_together():
    rows = shuffled(10, 50)
    window = Window(iter(rows), 200, ["doc", "question"])
    given = list(window)
    assert sorted(row.index for row in given) == list(range(500))
    assert changes(rows) > 400
    assert changes(given) <= 35  # replacement selection: about 500 / (2 * 200) rounds of 10


def test_the_order_of_the_columns_is_learnt_from_the_prompts():
    window = Window(iter(shuffled(10, 50)), 500, ["question", "doc"])
    given = []
    for row in window:
        given.append(row)
        window.learn(row, f"Read: {row.values['doc']}\nAnswer: {row.values['question']}")
    assert window.order == ["doc", "question"]
    assert changes(given[SAMPLE_ROWS:]) <= 10


def test_a_window_reads_no_further_than_its_size():
    read = []

    def source():
        for index in range(100):
            read.append(index)
            yield Row(index, {"n": index})

    window = Window(source(), 7, ["n"])
    for given in range(1, 50):
        next(window)
        assert len(read) == given + 6


def test_rows_of_one_prefix_meet_in_the_cache(tmp_path):
    """Ten documents, shuffled, on a cache that is emptied every 50 requests."""

    class Forgetful(rm.ScriptedBackend):
        async def generate(self, request):
            if len(self.requests) % 50 == 0:
                self.flush_cache()
            async for chunk in super().generate(request):
                yield chunk

    @rm.function
    def ask(s, question, doc):
        s += doc + " " + question + rm.gen("x")

    rows = [
        {"question": f"question {q}", "doc": f"document {d} " + f"d{d}w " * 50}
        for d in range(10)
        for q in range(50)
    ]
    random.Random(2).shuffle(rows)
    shares = []
    for look_ahead in (1, 500):
        summary = ask.run_batch(
            rows,
            out=tmp_path / f"{look_ahead}.jsonl",
            concurrency=1,
            look_ahead=look_ahead,
            backend=Forgetful(lambda request: "yes"),
        )
        shares.append(summary.cached_share)
    assert shares[1] > 0.9 > shares[0] + 0.05
