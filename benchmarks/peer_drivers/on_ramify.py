"""Ramify, as an engine in this process."""

from __future__ import annotations

import json
import sys

from ramify.runtime.engine.engine import Engine


def main() -> None:
    given = json.loads(sys.argv[1])
    with Engine(given["model"], threads=given["threads"], speculation=given["speculation"]) as engine:
        print(json.dumps({"peer": {}}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            segments = [(tuple(prompt),) for prompt in asked["prompts"]]
            answers = engine.complete_many(
                segments, max_tokens=asked["output"], temperature=0.0, ignore_eos=True
            )
            outputs = [answer.usage.completion_tokens for answer in answers]
            print(json.dumps({"peer": {"outputs": outputs}}), flush=True)


if __name__ == "__main__":
    main()
