"""Rows and outputs that are not JSON: they fail by themselves, or run, and no other row is lost by them."""

from __future__ import annotations

import dataclasses
import json
import math
from types import MappingProxyType
from typing import Any

import pytest

import ramify as rm
from ramify.errors import InvalidRequest
from ramify.lang.batch.json_text import NotJson, canonical, encode
from ramify.lang.batch.keys import Unreadable
from ramify.ray.parts import row_id
from tests.lang.batch import batches
from tests.lang.batch.batches import by_index as lines


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


class Broken:
    """An object whose text cannot be made."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Mock:
    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: Mock()


HIMSELF: list[Any] = []
HIMSELF.append(HIMSELF)

ODD = {
    "a half of a surrogate pair": "\ud800",
    "keys that are no texts": {(1, 2): "a", None: "b", 3: "c"},
    "3,000 deep": nested(3000),
    "50,000 deep": nested(50_000),
    "itself": HIMSELF,
    "a set of several types": {1, "a", (2, 3)},
    "a broken object": Broken(),
    "a mock": Mock(),
    "NaN": math.nan,
}


@rm.function
def echo(s, text):
    s += "Q:" + (text if isinstance(text, str) else "odd") + rm.gen("x", max_tokens=4)


@rm.function
async def aecho(s, text):
    s += "Q:" + (text if isinstance(text, str) else "odd") + rm.gen("x", max_tokens=4)


@pytest.fixture(params=[echo, aecho], ids=["threads", "tasks"])
def program(request):
    return request.param


def run(program, rows, **options):
    return batches.run(program, rows, backend=rm.ScriptedBackend(lambda request: "yes"), **options)


def test_odd_rows_end_no_batch(program, out):
    """Odd values reach the program: reading, ordering and writing rows do not fail on them."""
    rows = [{"text": value} for value in ODD.values()]
    rows[1:1] = [{"text": "fine"}]
    run(program, rows, out=out)
    found = lines(out)
    assert [line["index"] for line in found] == list(range(len(rows)))
    assert found[1]["outputs"] == {"x": "yes"}
    assert [line["error"] for line in found] == [None] * len(rows)
    again = run(program, rows, out=out)
    assert (again.rows, again.skipped, again.failed_before) == (0, len(rows), 0)


def test_odd_rows_in_memory_and_in_a_dry_run(program):
    rows = [{"text": value} for value in [*ODD.values(), "fine"]]
    states = run(program, rows)
    assert [state.error() is None for state in states] == [True] * len(rows)
    estimate = run(program, rows[:8], dry_run=True)
    assert (estimate.rows, estimate.failed) == (8, 0)


@pytest.mark.parametrize("name", ODD)
def test_every_row_has_a_digest(name):
    first, second = canonical({"text": ODD[name]}), canonical({"text": ODD[name]})
    assert first == second
    others = [canonical({"text": value}) for other, value in ODD.items() if other != name]
    assert first not in [*others, canonical({"text": "fine"}), canonical({"text": None})]
    if name not in ("a broken object", "a mock", "a set of several types"):  # no column of Arrow has these
        assert len(row_id({"text": ODD[name]})) == 32


def test_the_digest_of_plain_rows_is_what_it_was(out):
    """The digest must not change: rows of existing results files are found by it."""
    assert canonical({"b": [1, None, 2.5], "a": "é"}) == '{"a":"é","b":[1,null,2.5]}'.encode()


def test_rows_of_subclasses_have_digests_of_their_own():
    rows = [
        Unreadable("Line 1"),
        Unreadable("Line 2"),
        MappingProxyType({"a": 1}),
        MappingProxyType({"a": 2}),
    ]
    assert [canonical(row) for row in rows] == [b'"Line 1"', b'"Line 2"', b'{"a":1}', b'{"a":2}']


def test_rows_without_a_key_fail_by_themselves(program, out):
    rows = [
        {"id": 1, "text": "a"},
        {"text": "no key"},
        {"id": None, "text": "null"},
        {"id": "\ud800", "text": "b"},
        {"id": nested(50_000), "text": "c"},
        {"id": 2, "text": "d"},
    ]
    summary = run(program, rows, out=out, key="id")
    assert [line["key"] for line in lines(out)] == [1, None, None, None, None, 2]
    messages = [line["error"] and line["error"]["message"] for line in lines(out)]
    assert [message is None for message in messages] == [True, False, False, False, False, True]
    for message, said in zip(
        messages[1:5], ("no 'id', the key column", "is null", "surrogate", "too deep"), strict=True
    ):
        assert message.startswith("The row was not run: ")
        assert said in message
    assert (summary.rows, summary.failed) == (6, 4)
    assert run(program, rows, out=out, key="id").skipped == 6
    mended = [*rows[:1], {"id": 7, "text": "no key"}, *rows[2:]]
    assert run(program, mended, out=out, key="id").rows == 1


def test_a_first_row_without_a_key_fails_alone(program, out):
    rows = [{"text": "a"}, {"id": 1, "text": "b"}]
    assert run(program, rows, out=out, key="id").failed == 1
    assert [line["key"] for line in lines(out)] == [None, 1]
    assert run(program, iter(rows), out=out, key="id").skipped == 2


def test_a_key_that_no_row_has_is_refused(program, out):
    with pytest.raises(InvalidRequest, match="Row 0 has no 'nr', the key column"):
        run(program, [{"text": "a"}], out=out, key="nr")


def test_messages_say_that_a_row_was_not_run(program, out):
    run(program, [{"wrong": 1}, 5, {"text": "a"}], out=out)
    errors = [line["error"] and (line["error"]["type"], line["error"]["message"]) for line in lines(out)]
    assert errors == [
        ("TypeError", "The row was not run: missing a required argument: 'text'"),
        ("InvalidRequest", "The row was not run: A row must be a mapping, a list or a tuple, not int."),
        None,
    ]


@dataclasses.dataclass
class Size:
    width: float


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (math.nan, "NaN"),
        ([1.0, math.inf, None], [1.0, "Infinity", None]),
        ({"a": (-math.inf,)}, {"a": ["-Infinity"]}),
        (Size(math.nan), {"width": "NaN"}),
        (None, None),
        ({1: "a", (2, 3): "b"}, {"1": "a", "(2, 3)": "b"}),
        (1 << 80, 1 << 80),
    ],
)
def test_outputs_that_json_does_not_have(out, value, written):
    @rm.function
    def program(s):
        s["x"] = value
        return value

    assert program.run_batch([{}], out=out, backend=rm.ScriptedBackend([])).failed == 0
    (line,) = lines(out)
    assert (line["outputs"]["x"], line["returned"]) == (written, written)


def test_numbers_of_numpy_stay_numbers(out):
    np = pytest.importorskip("numpy")
    assert json.loads(encode([np.float32(1.5), np.int64(3), np.arange(2), np.float64("nan")])) == [
        1.5,
        3,
        [0, 1],
        "NaN",
    ]
    assert canonical({"n": np.int64(3)}) == canonical({"n": 3}) != canonical({"n": np.int64(4)})


@pytest.mark.parametrize(
    ("value", "said"), [("\ud800", "surrogate"), (nested(50_000), "too deep"), (Broken(), "no text")]
)
def test_an_output_that_cannot_be_written_fails_its_row_alone(program, out, value, said):
    @rm.function
    def odd(s, bad):
        s["fine"], s["x"] = "kept", value if bad else "fine"
        return value if bad else "fine"

    summary = odd.run_batch([(True,), (False,)], out=out, backend=rm.ScriptedBackend([]))
    first, second = lines(out)
    assert first["outputs"] == {"fine": "kept"}
    assert "What the program returned cannot be written as JSON: " in first["error"]["message"]
    assert said in first["error"]["message"]
    assert second["outputs"] == {"fine": "kept", "x": "fine"}
    assert summary.failed == 1
    with pytest.raises(NotJson, match=said):
        encode(value)


def test_an_error_that_is_no_text_keeps_what_it_says(out):
    @rm.function
    def odd(s):
        raise ValueError("bad \ud800 text")

    odd.run_batch([{}], out=out, backend=rm.ScriptedBackend([]))
    assert lines(out)[0]["error"]["message"] == "The program raised ValueError: bad \\ud800 text"


def test_constants_that_are_no_text_end_no_batch(out):
    bound = echo.bind(text="\ud800" * 5000)
    assert bound.run_batch([{}], out=out, backend=rm.ScriptedBackend([], strict=False)).failed == 1
