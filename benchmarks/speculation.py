"""Speculation on and off: output tokens a second of several kinds of work, on two engines in turn.

    python -m benchmarks.speculation [--at-once 1] [--temperature 0] [--rounds 4] [--only extract]

Every round has prompts of its own, the same for both engines, so no answer is repeated from an earlier round.
The gain depends on how much of an output stands in its prompt or in other outputs: `rewrite` repeats a text,
`extract` takes the fields of a JSON object from a text, and `invent` fills a JSON object freely. In `story`
there is nothing to repeat but the small model's own repetitions.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ramify as rm
from ramify.constraint import Constraint

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at-once", type=int, default=1, help="requests at a time")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
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
