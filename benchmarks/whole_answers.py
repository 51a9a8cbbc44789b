"""Whole answers over HTTP: is every answer valid, under every token budget that is not refused?

``python -m benchmarks.whole_answers [--schemas 500] [--beside 30] [--serve "--load-format dummy"]`` starts a
server and asks for chat completions under published schemas, each with 1.0, 1.2 and 2 times the tokens of its
shortest completion, streamed and not, while other requests run beside them. The refusal of ``max_tokens: 1``
states the shortest completion. The package jsonschema judges the answers, and ``finish_reason`` must be
"stop".
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
from collections import Counter
from random import Random

from tests.end_to_end.served import serve
from tests.end_to_end.whole_answers import ask_all
from tests.grammar.collection.cases import real_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--beside", type=int, default=30, help="other requests at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", default="", help="arguments of `ramify serve`")
    arguments = parser.parse_args()
    cases = real_world()
    cases = Random(0).sample(cases, min(arguments.schemas, len(cases)))
    with serve(*shlex.split(arguments.serve)) as served:
        found = asyncio.run(ask_all(served.url, cases, arguments.beside, arguments.seed))
    apart = Counter(each.fault for each in found if each.fault in ("refused", "too long"))
    answers = [each for each in found if each.fault not in apart]
    valid = sum(not each.fault for each in answers)
    print(f"{len(cases)} schemas: {apart['refused']} refused, {apart['too long']} too long", end="; ")
    budgets = sorted(each.budget for each in answers) or [0]
    print(f"{valid} of {len(answers)} answers are valid, of {budgets[0]} to {budgets[-1]} tokens", end="")
    print(f" (median {budgets[len(budgets) // 2]})")
    for each in found:
        if each.fault:
            print(f"    {each._replace(text=each.text[:300])}")


if __name__ == "__main__":
    main()
