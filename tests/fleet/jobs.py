"""Jobs of every kind for a fleet whose replicas come and go. The answer of each job can be compared."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import ramify as rm
from ramify.constraint import json_schema
from ramify.loop import wait
from ramify.messages import Generate, TextChunk
from ramify.runtime.engine.engine import Engine
from ramify.runtime.processes.detokenizer import joined
from ramify.sampling_params import SamplingParams

NUMBERS = itertools.count()
CITIES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Delhi", "Quito", "Bern")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "maximum": 99999},
    },
    "required": ["city", "people"],
}


def streamed(engine: Engine, prompt: str, options: dict[str, Any], schema: Any = None) -> Any:
    """(text, ids, finish reason) of a stream."""

    async def collect() -> TextChunk:
        request = Generate(
            rid=f"job-{next(NUMBERS)}",
            prompt=(prompt,),
            sampling=SamplingParams(**options),
            constraint=None if schema is None else json_schema(schema),
        )
        return joined([chunk async for chunk in engine.generate(request)])

    found = wait(collect())
    assert found.finish is not None
    return found.text, found.ids, found.finish.reason


def greedy(engine: Engine, index: int) -> Any:
    options = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
    return streamed(engine, f"{index}. The story of {CITIES[index % 8]} begins", options)


def seeded(engine: Engine, index: int) -> Any:
    options = {"temperature": 1.0, "seed": index, "max_tokens": 48, "logprobs": 1}
    return streamed(engine, f"Once upon a time in {CITIES[index % 8]}, ", options)


def stopped(engine: Engine, index: int) -> Any:
    options = {"temperature": 0.8, "seed": index, "max_tokens": 64, "stop": (".", " the end")}
    return streamed(engine, f"{CITIES[index % 8]} is", options)


def healed(engine: Engine, index: int) -> Any:
    """A completion of a prompt that ends inside a word."""
    options = {"temperature": 0.7, "seed": index, "max_tokens": 40, "ignore_eos": True}
    return streamed(engine, f"{index}: The capital of {CITIES[index % 8]} has wonderf", options)


def constrained(engine: Engine, index: int) -> Any:
    options = {"temperature": 1.0, "seed": index, "max_tokens": 64}
    return streamed(engine, f"{index} {CITIES[index % 8]} as JSON: ", options, SCHEMA)


@rm.function
def chosen(s: rm.State, city: str) -> None:
    s += f"Is {city} large or small? It is "
    s += rm.select("size", ["large", "small", "neither of them"])
    s += ". It is known for" + rm.gen("known", max_tokens=16, temperature=0.0, ignore_eos=True)


@rm.function
def forked(s: rm.State, city: str) -> None:
    s += f"Notes about {city}, for people who have never been there and would like to go soon.\n"
    views = s.fork(4)
    for number, view in enumerate(views):
        view += f"{number}. " + rm.gen("note", max_tokens=12, temperature=0.9, seed=number, ignore_eos=True)
    views.join()
    s += "Sum: " + rm.gen("sum", max_tokens=16, temperature=0.0, ignore_eos=True)


@rm.tool
def weather(city: str, days: int) -> str:
    """Look up the weather."""
    return f"{city}: rain for {days} days"


@rm.function
def called(s: rm.State, city: str) -> None:
    s += rm.system("You answer questions by calling functions.", tools=[weather])
    s += rm.user(f"What is the weather in {city}?")
    s.call_tools([weather], name="calls", max_calls=1, max_tokens=64, temperature=0)
    s += rm.assistant(rm.gen("answer", max_tokens=16, temperature=0.0, ignore_eos=True))


COMPILED = forked.compile()


def selects(engine: Engine, index: int) -> Any:
    state = chosen.run(CITIES[index % 8] + str(index), backend=engine)
    return state["size"], state["known"]


def forks(engine: Engine, index: int) -> Any:
    return forked.run(CITIES[index % 8] + str(index), backend=engine).text()


def compiled(engine: Engine, index: int) -> Any:
    return COMPILED.run(city=CITIES[index % 8] + str(index), backend=engine).text()


def tools(engine: Engine, index: int) -> Any:
    state = called.run(CITIES[index % 8] + str(index), backend=engine)
    return json.dumps(state["calls"], default=str), state["answer"]


KINDS: dict[str, Callable[[Engine, int], Any]] = {
    "greedy": greedy,
    "seeded": seeded,
    "stop": stopped,
    "healing": healed,
    "schema": constrained,
    "select": selects,
    "fork": forks,
    "compiled": compiled,
    "tools": tools,
}


@dataclasses.dataclass(frozen=True)
class Job:
    kind: str
    index: int

    def answer(self, engine: Engine) -> Any:
        return KINDS[self.kind](engine, self.index)


def all_jobs(each: int) -> list[Job]:
    """`each` jobs of every kind, the kinds in turn."""
    return [Job(kind, index) for index in range(each) for kind in KINDS]
