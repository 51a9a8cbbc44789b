"""A request whose engine core has died continues after the output that it had, wherever that output ends."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ramify.constraint import Constraint, regex
from ramify.errors import WorkerDied
from ramify.messages import Continuation, Finish, Generate, Preamble, TextChunk
from ramify.runtime.frontend.output_queue import OutputQueue
from ramify.runtime.scheduler.requests.constrained import Healer
from tests.runtime.local import LocalScheduler, Result
from tests.runtime.test_healing import vocabulary
from tests.runtime.test_preambles import Thinking


def cut(result: Result, end: int) -> Continuation:
    forced = tuple(place for place in result.forced if place < end)
    return Continuation(ids=tuple(result.ids[:end]), replaced=result.replaced, forced=forced)


def assert_same(again: Result, result: Result) -> None:
    assert again.error is None
    assert (again.ids, again.overlap, again.finish) == (result.ids, result.overlap, result.finish)
    assert (again.forced, again.replaced) == (result.forced, result.replaced)
    assert again.usage is not None
    assert result.usage is not None
    for name in ("prompt_tokens", "completion_tokens", "forced_tokens"):
        assert getattr(again.usage, name) == getattr(result.usage, name)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_that_end_inside_a_token(tiny_model: Any, temperature: float) -> None:
    draw = random.Random(5)
    prompts = [[draw.choice(b"abcd :") for _ in range(draw.randint(2, 9))] for _ in range(20)]
    asked = {"open_end": True, "max_tokens": 4, "ignore_eos": True, "temperature": temperature, "seed": 11}
    results = LocalScheduler(tiny_model, healer=Healer(vocabulary())).complete(prompts, **asked)
    assert {result.replaced for result in results} >= {0, 1, 2}
    for end in (1, 3):
        local = LocalScheduler(tiny_model, healer=Healer(vocabulary()))
        rids = [
            local.submit(prompt, continues=cut(result, end), **asked)
            for prompt, result in zip(prompts, results, strict=True)
        ]
        local.run()
        for rid, result in zip(rids, results, strict=True):
            assert_same(local.results[rid], result)


@pytest.mark.parametrize(
    ("preambles", "constraint", "sampling"),
    [
        ((), regex("begin [0-9]{3} end( [a-z]{2})*"), {}),
        ((), regex("begin [0-9]{3} end"), {"temperature": 1.0, "seed": 9}),
        ((Preamble(end="</x>", max_tokens=6, apart=True),), regex("[0-9]{3}"), {}),
        ((Preamble(end="</x>", max_tokens=4, apart=True, counted=False),), None, {"max_tokens": 9}),
        ((), None, {"temperature": 1.0, "seed": 2, "max_tokens": 8, "frequency_penalty": 1.0}),
        ((), None, {"temperature": 1.0, "seed": 2, "max_tokens": 8, "min_tokens": 6}),
    ],
    ids=["forced", "seeded", "thoughts", "thoughts apart", "penalty", "least"],
)
def test_grammars_and_thoughts(
    tiny_folder: Path,
    preambles: tuple[Preamble, ...],
    constraint: Constraint | None,
    sampling: dict[str, Any],
) -> None:
    local = Thinking(tiny_folder, jump_forward=True)
    result = local.ask(*preambles, constraint=constraint, **sampling)
    for end in range(1, len(result.ids), 3):
        again = local.ask(*preambles, constraint=constraint, continues=cut(result, end), **sampling)
        if result.forced:  # a cut inside forced text leaves the rest forced
            assert set(again.forced) >= set(result.forced[: len(cut(result, end).forced)])
            assert (again.ids, again.finish) == (result.ids, result.finish)
        else:
            assert_same(again, result)


def test_an_output_that_the_grammar_forbids_is_refused(tiny_folder: Path) -> None:
    output = Continuation(ids=tuple(b"12x"))
    result = Thinking(tiny_folder).ask(constraint=regex("[0-9]{9}"), continues=output)
    assert "refused token" in str(result.error)


def chunk(text: str, **fields: Any) -> TextChunk:
    return TextChunk(rid="r", text=text, ids=tuple(text.encode()), **fields)


async def queue_with(*texts: str) -> OutputQueue:
    queue = OutputQueue(Generate(rid="r", prompt=("p",)))
    for text in texts:
        queue.put(chunk(text, forced=(0,)))
        await queue.next()
    return queue


@pytest.mark.parametrize("repeated", [["abcdef"], ["abc", "def"], ["a", "bcd", "ef"], ["abcd", "ef"]])
async def test_what_has_arrived_is_not_repeated(repeated: list[str]) -> None:
    queue = await queue_with("ab", "cd")
    assert queue.rest().continues == Continuation(ids=tuple(b"abcd"), forced=(0, 2))
    for text in repeated:
        queue.put(chunk(text))
    told = [await queue.next() for _ in repeated]
    assert "".join(one.text for one in told) == "ef"
    assert b"".join(bytes(one.ids) for one in told) == b"ef"
    assert queue.rest().continues == Continuation(ids=tuple(b"abcdef"), forced=(0, 2))


@pytest.mark.parametrize("wrong", [chunk("abX"), chunk("ab", finish=Finish(reason="stop"))])
async def test_another_text_fails(wrong: TextChunk) -> None:
    queue = await queue_with("abcd")
    queue.rest()
    queue.put(wrong)
    with pytest.raises(WorkerDied, match="differs"):
        await queue.next()
