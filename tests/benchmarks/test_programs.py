"""`benchmarks.programs`: both ways of writing a program send the same."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import ramify as rm
from benchmarks.client_programs import PROGRAMS
from benchmarks.programs import Done, show, total
from tests.lang.programs import CASES

pytestmark = pytest.mark.slow


def rendered(prompt) -> str:
    """A conversation as the scripted backend's template renders it."""
    if isinstance(prompt, str):
        return prompt
    turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in prompt]
    return "".join(turns) + "<|im_start|>assistant\n"


@pytest.mark.parametrize("name", CASES)
def test_both_ask_for_the_same(name):
    case, (row,) = CASES[name], CASES[name].rows(1)
    asked: Counter[tuple[str, str]] = Counter()

    async def ask(variable, prompt, *, stop=(), **options):
        asked[variable, rendered(prompt)] += 1
        answer = case.script[variable] if isinstance(case.script, dict) else case.script(None)
        for end in [stop] if isinstance(stop, str) else stop:
            answer = answer.partition(end)[0]
        return answer

    asyncio.run(PROGRAMS[name](ask, **row))
    trace = case.program.run(**row, backend=rm.ScriptedBackend(case.script)).trace
    steps = [call for call in trace.walk() if call.kind in ("gen", "select")]
    assert asked == Counter((call.name, call.prompt) for call in steps)


def test_every_program_has_its_twin():
    assert PROGRAMS.keys() == CASES.keys()


def test_totals_are_over_all_programs(capsys: pytest.CaptureFixture[str]) -> None:
    show("all", {"http": total([Done(2.0, 1), Done(8.0, 2)]), "client": total([Done(4.0, 3), Done(6.0)])})
    ours, client = (text.split() for text in capsys.readouterr().out.splitlines())
    assert ours[:5] == ["all", "http", "10.00", "1.00x", "3"]
    assert client[:5] == ["all", "client", "10.00", "1.00x", "3"]
