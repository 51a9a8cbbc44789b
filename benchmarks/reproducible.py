"""Whether a request's output is the same alone and beside others: eight kinds of seeded requests.

    python -m benchmarks.reproducible [--model NAME] [--count 200] [--at-once 24] [--options KEY=VALUE …]

One engine runs one request at a time, without prefix cache, cascade and drafts: its outputs are wanted.
Another one runs all kinds at once in random order, with short chunks and few pages; beside a tenth of the
requests another one is started and aborted. Outputs are compared to the last bit of their log-probabilities,
where they have some. `--options deterministic=false` shows what the default spares.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import ramify as rm
from ramify.constraint import Constraint

TOPICS = ["rain", "chess", "bread", "rivers", "clocks", "owls", "glass", "tea", "maps", "snow", "trains"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LONG = (
    "A note on {}. " + "We write down what we have seen, a line for each day, and keep the lines short. " * 6
)
Kind = Callable[[rm.Engine, int], Awaitable[object]]


def _topic(number: int) -> str:
    return TOPICS[number % len(TOPICS)]


async def _text(engine: rm.Engine, prompt: str, number: int, **options: Any) -> object:
    found = await engine.acomplete(prompt, seed=number, **{"max_tokens": 24, "logprobs": 2} | options)
    return found.text, found.logprobs, found.prompt_logprobs


async def greedy(engine: rm.Engine, number: int) -> object:
    return await _text(engine, f"{number} facts about {_topic(number)}: first,", number, temperature=0.0)


async def sampled(engine: rm.Engine, number: int) -> object:
    return await _text(engine, f"A story of {_topic(number)}.", number, temperature=1.0)


async def nucleus(engine: rm.Engine, number: int) -> object:
    prompt = LONG.format(_topic(number % 3)) + f"Day {number}:"
    return await _text(engine, prompt, number, temperature=0.8, top_p=0.9)


async def penalised(engine: rm.Engine, number: int) -> object:
    options = {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.4, "min_p": 0.02}
    return await _text(engine, f"List: {_topic(number)}, {_topic(number + 1)},", number, **options)


async def repeated(engine: rm.Engine, number: int) -> object:
    line = f"{_topic(number)} and {_topic(number + 5)}; "
    return await _text(engine, line * 8, number, temperature=0.0, logprobs=None)  # drafts are right here


async def as_json(engine: rm.Engine, number: int) -> object:
    constraint = Constraint(kind="json_schema", source=json.dumps(SCHEMA))
    prompt = f"Somebody who likes {_topic(number)}, as JSON: "
    return await _text(engine, prompt, number, temperature=0.7, constraint=constraint, max_tokens=40)


async def scored(engine: rm.Engine, number: int) -> object:
    prompt = LONG.format(_topic(number % 3)) + f"The end of day {number}."
    return await _text(engine, prompt, number, temperature=0.0, max_tokens=1, prompt_logprobs_start=1)


async def embedded(engine: rm.Engine, number: int) -> object:
    text = LONG.format(_topic(number % 3)) + str(number)
    return (await asyncio.to_thread(engine.embed, text, pooling="mean")).tobytes()


KINDS: dict[str, Kind] = {
    "greedy": greedy,
    "sampled": sampled,
    "nucleus": nucleus,
    "penalised": penalised,
    "repeated": repeated,
    "json": as_json,
    "prompt log-probabilities": scored,
    "embedding": embedded,
}


async def alone(engine: rm.Engine, count: int) -> dict[tuple[str, int], object]:
    found: dict[tuple[str, int], object] = {}
    for name, kind in KINDS.items():
        for number in range(count):
            found[name, number] = await kind(engine, number)
    return found


async def beside(engine: rm.Engine, count: int, at_once: int, seed: int) -> dict[tuple[str, int], object]:
    rng = random.Random(seed)
    order = [(name, number) for name in KINDS for number in range(count)]
    rng.shuffle(order)
    places = asyncio.Semaphore(at_once)
    found: dict[tuple[str, int], object] = {}

    async def one(name: str, number: int, *, abort: bool) -> None:
        async with places:
            other = asyncio.ensure_future(greedy(engine, number + 7)) if abort else None
            found[name, number] = await KINDS[name](engine, number)
            if other is not None:
                other.cancel()
                await asyncio.gather(other, return_exceptions=True)

    await asyncio.gather(*(one(*key, abort=rng.random() < 0.1) for key in order))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="the default model otherwise")
    parser.add_argument("--count", type=int, default=200, help="requests of each kind")
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--num-pages", type=int, default=300, help="of the engine that runs all at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", nargs="*", default=[], help="of both engines, as deterministic=false")
    args = parser.parse_args()
    given: dict[str, Any] = {}
    for option in args.options:
        name, _, value = option.partition("=")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    one_by_one = {"prefix_cache": "naive", "speculation": False, "cascade": False, "max_running": 1}
    with rm.Engine(args.model, **given, **one_by_one) as engine:
        wanted = asyncio.run(alone(engine, args.count))
    busy = {"num_pages": args.num_pages, "chunk_tokens": 96, "max_running": 12}
    with rm.Engine(args.model, **busy | given) as engine:
        found = asyncio.run(beside(engine, args.count, args.at_once, args.seed))
        stats = engine.stats()
    for name in KINDS:
        equal = sum(found[name, number] == wanted[name, number] for number in range(args.count))
        print(f"{name:26} {equal:4} of {args.count} equal", flush=True)
    print(
        f"{stats.retractions} retractions, {stats.evicted_pages} pages evicted, "
        f"{stats.cached_tokens} prompt tokens cached, {stats.draft_tokens} draft tokens"
    )


if __name__ == "__main__":
    main()
