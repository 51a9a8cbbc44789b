"""Speculation on and off: output tokens a second of several kinds of work, on two engines in turn.

    python -m benchmarks.speculation [--at-once 1] [--temperature 0] [--rounds 4] [--only extract]
    python -m benchmarks.speculation --head

Every round has prompts of its own, the same for both engines, so no answer is repeated from an earlier round.
The gain depends on how much of an output stands in its prompt or in other outputs: `rewrite` repeats a text,
`extract` takes the fields of a JSON object from a text, and `invent` fills a JSON object freely. In `story`
there is nothing to repeat but the small model's own repetitions.

With --head: the milliseconds of a pass of an EAGLE-3 head with random weights beside the model, at 512 tokens
of context, and the acceptance from which its next draft token pays, by the rule of `StepDrafts`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import ramify as rm
from ramify.constraint import Constraint
from ramify.runtime.config import DEFAULT_MODEL, EngineConfig
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.build import build_runners
from ramify.runtime.executor.load import loader
from ramify.runtime.executor.runner import Runner
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.loading.load import read_shape
from ramify.runtime.model.shape.config import ModelConfig
from ramify.runtime.model.shape.heads import eagle3_head
from ramify.runtime.scheduler.requests.limits import TUNED

NAMES = ("Alice Moreau", "Bo Lindqvist", "Carla Rossi", "Deniz Kaya", "Emil Novak", "Farah Haddad")
CITIES = ("Lyon", "Uppsala", "Torino", "Izmir", "Brno", "Amman", "Skopje", "Osaka")
WORK = (
    "an engineer at the waterworks",
    "a teacher of music",
    "a baker",
    "a nurse at the hospital",
    "a surveyor",
)
LIKES = ("rowing", "chess", "long walks by the river", "old maps", "choir music", "beekeeping", "trams")
MAX_TOKENS = 96
REQUESTS = 6
"""Requests in a round, for each request that runs at once."""

Ask = tuple[str, Constraint | None]


def _object(**properties: dict[str, Any]) -> Constraint:
    return rm.constraint.json_schema(
        {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    )


def _text(size: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": size}


YEAR = {"type": "integer", "minimum": 1900, "maximum": 2100}
PERSON = _object(name=_text(40), born=YEAR, city=_text(30), work=_text(60), likes=_text(80))
INVENTED = _object(name=_text(40), born=YEAR, biography=_text(200))


def _life(draw: random.Random) -> str:
    likes = draw.sample(LIKES, 3)
    return (
        f"{draw.choice(NAMES)} was born in {draw.randrange(1950, 2005)} in {draw.choice(CITIES)}, is "
        f"{draw.choice(WORK)}, and likes {likes[0]}, {likes[1]} and {likes[2]}."
    )


def rewrite(draw: random.Random) -> Ask:
    return f"Correct the spelling and repeat the text: {_life(draw)} {_life(draw)}\nCorrected text:", None


def extract(draw: random.Random) -> Ask:
    return f"Extract the fields as JSON.\nText: {_life(draw)}\nJSON:", PERSON


def invent(draw: random.Random) -> Ask:
    return f"Invent a person from {draw.choice(CITIES)}, number {draw.randrange(10**6)}, as JSON:", INVENTED


def story(draw: random.Random) -> Ask:
    number = draw.randrange(10**6)
    return f"Write a story about {draw.choice(NAMES)} in {draw.choice(CITIES)}, number {number}.", None


KINDS: dict[str, Callable[[random.Random], Ask]] = {
    "rewrite": rewrite,
    "extract": extract,
    "invent": invent,
    "story": story,
}


def tokens_per_second(engine: rm.Engine, asks: list[Ask], at_once: int, temperature: float) -> float:
    def answer(ask: Ask) -> int:
        prompt, constraint = ask
        answered = engine.complete(
            prompt, max_tokens=MAX_TOKENS, temperature=temperature, seed=7, constraint=constraint
        )
        return answered.usage.completion_tokens

    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        tokens = sum(threads.map(answer, asks))
    return tokens / (time.perf_counter() - began)


def head_costs(repeats: int = 40) -> None:
    files = resolve(DEFAULT_MODEL)
    shape = read_shape(files.weights)
    assert isinstance(shape, ModelConfig)
    sizes = {
        name: getattr(shape, name) for name in ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    }
    sizes |= {"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps(sizes | {"draft_vocab_size": shape.vocab_size // 2})
        )
        head = eagle3_head(Path(folder), "head", shape)
    config = EngineConfig(num_pages=256)
    load, empty = (
        loader(dataclasses.replace(config, load_format=form), files, each, shape.context_length)
        for form, each in (("auto", shape), ("dummy", head))
    )
    runner, drafting = build_runners(config, load, empty)
    assert drafting is not None
    size = runner.pool.page_size

    def timed(runner: Runner, rows: int) -> float:
        ids = np.arange(512 + rows, dtype=np.int32)
        batch = pack([Extension(ids, 512, 512 + rows, range(-(-len(ids) // size)))], size)
        began = time.perf_counter()
        runner.logits(runner.forward(batch))
        return 1e3 * (time.perf_counter() - began)

    cases = {"model, 1 row": (runner, 1), "model, 2 rows": (runner, 2), "model, 4 rows": (runner, 4)}
    cases["head, 1 row"] = (drafting, 1)
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(repeats + 3):
        for name, case in cases.items():
            milliseconds = timed(*case)
            if number >= 3:  # the first ones warm up
                found[name].append(milliseconds)
    for name, each in found.items():
        low, middle, high = statistics.quantiles(each, n=4)
        print(f"{name:14} {middle:6.2f} ms (quartiles {low:.2f} to {high:.2f})")
    step, four, own = (
        statistics.median(found[name]) for name in ("model, 1 row", "model, 4 rows", "head, 1 row")
    )
    row = (four - step) / 3
    print(f"a draft token costs {(own + row) / step:.2f} of a step, and must promise {TUNED.least_gain}x")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at-once", type=int, default=1, help="requests at a time")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--head", action="store_true", help="the costs of a draft head")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    if options.head:
        head_costs()
        return
    with rm.Engine(speculation=False) as without, rm.Engine(speculation=True) as with_:
        for name in options.only:
            rates: dict[rm.Engine, list[float]] = {without: [], with_: []}
            for number in range(-1, options.rounds):  # the first one warms up, and compiles the grammars
                draw = random.Random(f"{name} {number}")
                asks = [KINDS[name](draw) for _ in range(REQUESTS * options.at_once)]
                for engine in (without, with_) if number % 2 else (with_, without):
                    rate = tokens_per_second(engine, asks, options.at_once, options.temperature)
                    if number >= 0:
                        rates[engine].append(rate)
            off, on = statistics.median(rates[without]), statistics.median(rates[with_])
            ratios = [b / a for a, b in zip(rates[without], rates[with_], strict=True)]
            print(
                f"{name:8} {options.at_once:3} at once: {off:5.0f} tokens/s without drafts, {on:5.0f} with: "
                f"{on / off:.2f}x (rounds {min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
