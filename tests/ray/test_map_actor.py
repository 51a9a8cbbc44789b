"""A `map_program` actor whose engine does not come back."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

import ramify as rm
from ramify.errors import EngineClosed
from ramify.ray import map_actor
from ramify.ray.data import _record
from ramify.ray.map_actor import ProgramActor, Work
from ramify.ray.parts import Parts


@rm.function
def ask(s, question):
    s += question + rm.gen("answer")


def gave_up(request: Any) -> str:
    if request.prompt[0] == "last":
        raise EngineClosed("The engine core died four times within a minute.")
    return "yes"


def run_actor(folder: str) -> None:
    import pyarrow as pa

    parts = Parts(folder, _record(ask, {}, {}, {}))
    parts.begin()
    work = Work(ask, {}, {}, 4, 4, None, False, None, {}, parts)
    map_actor.make_backend = lambda engine: rm.ScriptedBackend(gave_up)  # type: ignore[assignment]

    async def rows() -> None:
        actor = ProgramActor(work)
        await actor(pa.table({"question": ["first"]}))
        await actor(pa.table({"question": ["last"]}))

    try:
        asyncio.run(rows())
    finally:
        os._exit(3)  # also where an error got here


def test_an_actor_whose_engine_has_given_up_ends_and_keeps_its_rows(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    process = multiprocessing.get_context("spawn").Process(target=run_actor, args=(str(tmp_path),))
    process.start()
    process.join(60)
    assert process.exitcode == 1, "an actor that raises would stay, and get the same task again"
    lines = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert [line["outputs"] for line in lines if "outputs" in line] == [{"answer": "yes"}]
