"""Questions per second about one state, beside vLLM and llama.cpp, in turn on this machine's CPU.

    python -m benchmarks.decision_peers --url ramify=http://127.0.0.1:30000 vllm=http://127.0.0.1:8000
    python -m benchmarks.decision_peers --model FILE.gguf --llama FOLDER

With --url: servers with System One (`POST /v1/systemone`) that run already, with the same weights and cores.
Each is asked the same predicates about the same state, in requests of at most --at-once questions (vLLM
takes 64), or of at most NUMBER for ``NAME:NUMBER=URL``. vLLM 0.32 and Ramify may both run dummy weights of
the shape of Qwen3-0.6B:

    ramify serve FOLDER --load-format dummy --port 30000
    VLLM_CPU_KVCACHE_SPACE=2 vllm serve FOLDER --load-format dummy --dtype bfloat16 --max-num-seqs 64 \\
        --enable-prefix-caching --served-model-name m

With --llama: Ramify's engine in process and llama.cpp by node-llama-cpp in FOLDER, both with one GGUF file.

Every round has a new state, which is `cold` for its first question; then the questions follow, `warm`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.decisions import Questions, state_of
from benchmarks.peers import DRIVERS
from ramify.decisions.layouts import BLANK_LINE, LAYOUTS, PLAIN_CLOSING
from ramify.loop import wait
from ramify.messages import Generate
from ramify.questions import Decide, Question
from ramify.runtime.engine.engine import Engine
from ramify.sampling_params import SamplingParams

Ask = Callable[[str, Sequence[Question]], None]


class Server:
    """A server with System One."""

    def __init__(self, url: str, at_once: int) -> None:
        self._url, self._at_once = url, at_once

    def __call__(self, state: str, questions: Sequence[Question]) -> None:
        for begin in range(0, len(questions), self._at_once):
            part = questions[begin : begin + self._at_once]
            asked = {
                str(number): {"type": "noul", "instructions": question.instructions}
                for number, question in enumerate(part)
            }
            body = json.dumps({"model": "m", "state": state, "questions": asked}).encode()
            request = urllib.request.Request(
                self._url + "/v1/systemone", body, {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request) as response:
                answers = json.loads(response.read())["answers"]
            if set(answers) != set(asked):
                raise RuntimeError(f"{self._url} answered {len(answers)} of {len(asked)} questions")


class InProcess:
    """Ramify's engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._rids = engine, itertools.count()

    def __call__(self, state: str, questions: Sequence[Question]) -> None:
        request = Generate(
            rid=f"r{next(self._rids)}",
            prompt=(state,),
            sampling=SamplingParams(max_tokens=0),
            decide=Decide(questions=tuple(questions), layout="verbatim"),
        )

        async def answer() -> int:
            chunks = [chunk async for chunk in self._engine.generate(request)]
            assert chunks[-1].decisions is not None
            return len(chunks[-1].decisions.questions)

        if wait(answer()) != len(questions):
            raise RuntimeError("the engine did not answer all questions")


class LlamaCpp:
    """llama.cpp in a process of its own."""

    def __init__(self, folder: str, model: Path, context: int) -> None:
        given = {"model": str(model), "threads": len(os.sched_getaffinity(0)), "context": context}
        self._process = subprocess.Popen(
            ["node", str(DRIVERS / "decide_llama_cpp.mjs"), json.dumps(given)],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def __call__(self, state: str, questions: Sequence[Question]) -> None:
        assert self._process.stdin is not None
        forms = [next(iter(LAYOUTS["verbatim"].forms(question, 1))).body[0] for question in questions]
        texts = [f"{BLANK_LINE}{form}{PLAIN_CLOSING}" for form in forms]
        self._process.stdin.write(json.dumps({"state": state, "questions": texts}) + "\n")
        self._process.stdin.flush()
        if self._answer()["answered"] != len(questions):
            raise RuntimeError("llama.cpp did not answer all questions")

    def close(self) -> None:
        self._process.communicate(timeout=20)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"peer"'):
                return json.loads(line)["peer"]
        raise RuntimeError("llama.cpp has ended")


def measured(subjects: dict[str, Ask], count: int, tokens: int, rounds: int) -> None:
    questions, found = Questions(), dict[str, list[tuple[float, float]]]()
    for round_ in range(rounds + 1):  # the first warms up
        for name, ask in list(subjects.items())[:: -1 if round_ % 2 else 1]:
            state = f"Round {round_}.\n{state_of(tokens)}"
            times = [_timed(ask, state, questions.new(one)) for one in (1, count)]
            print(f"{name}: cold 1 {times[0]:.2f} s, warm {count} {times[1]:.2f} s", flush=True)
            if round_:
                found.setdefault(name, []).append((times[0], times[1]))
    first = next(iter(subjects))
    for name, rows in found.items():
        cold, warm = (statistics.median(column) for column in zip(*rows, strict=True))
        base = statistics.median([row[1] for row in found[first]])
        print(f"{name:<12} {count / warm:8.1f} questions/s ({warm / base:.1f}x the time), cold {cold:.2f} s")


def _timed(ask: Ask, state: str, questions: Sequence[Question]) -> float:
    began = time.perf_counter()
    ask(state, questions)
    return time.perf_counter() - began


def servers(given: Sequence[str], at_once: int) -> Iterator[tuple[str, Ask]]:
    for each in given:
        name, url = each.split("=", 1)
        name, _, most = name.partition(":")
        yield name, Server(url.rstrip("/"), int(most or at_once))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", nargs="*", default=[], metavar="NAME[:NUMBER]=URL")
    parser.add_argument("--at-once", type=int, default=64, help="questions of a request (64)")
    parser.add_argument("--llama", metavar="FOLDER", help="the folder of node-llama-cpp")
    parser.add_argument("--model", type=Path, help="a GGUF file, for --llama")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--state", type=int, default=4000, help="tokens of the state, about (4000)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    subjects: dict[str, Ask] = dict(servers(args.url, args.at_once))
    if args.llama is None:
        measured(subjects, args.questions, args.state, args.rounds)
        return
    with Engine(str(args.model), speculation=False) as engine:
        subjects["ramify"] = InProcess(engine)
        subjects["llama.cpp"] = llama = LlamaCpp(args.llama, args.model, args.state + 608)
        measured(subjects, args.questions, args.state, args.rounds)
        llama.close()


if __name__ == "__main__":
    main()
