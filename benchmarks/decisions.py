"""Decisions on one engine: 1, 16 and 400 questions about a state, beside the other ways to ask them.

    python -m benchmarks.decisions [--model NAME] [--state 4000] [--questions 1 16 400] [--rounds 3] [--serve]

In each round every case takes its turn on the same engine. No question is asked twice, so that only the state
can be cached. `cold`: nothing is cached. `warm`: the state is.

    one token      1 request of one output token, with the prompt of one question
    decide N       1 request with N questions
    logprobs N     N requests at once of one output token and 20 log-probabilities, as for endpoints without
                   decisions; cold: one after the other, each with a cache of its own, and only COLD of them
    select N       N requests at once that score the options as continuations (`Choices`)
    http N         decide N by POST /v1/decisions on a server of its own (--serve)

Prints the median seconds of each case, the ratios that are to be held, and for `decide` the tokens that the
engine computed beside state + forms + inner option tokens. `beyond the pass` is the time of a warm question
less the time that the engine was in its forward pass.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ramify.decisions.layouts import LAYOUTS
from ramify.loop import wait
from ramify.messages import Choices, Generate, TextChunk, Usage
from ramify.questions import PREDICATE_OPTIONS, Decide, LayoutName, Question
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.engine.engine import Engine
from ramify.sampling_params import SamplingParams
from tests.end_to_end.served import serve

COLD = 8
"""Requests of `logprobs` cold. Each computes the whole state."""
LAYOUT: LayoutName = "verbatim"


class Case(NamedTuple):
    name: str
    run: Callable[[int], list[Usage]]
    """Asks this number of new questions, and returns the usage of each request."""
    questions: int
    warm: bool


def state_of(tokens: int) -> str:
    """A text of about `tokens` tokens."""
    lines = (
        f"Order {number}: parcel {7 * number % 1000} left depot {number % 13}."
        for number in itertools.count()
    )
    return "\n".join(itertools.islice(lines, tokens // 17))


class Questions:
    """Questions that were never asked before, all of the same length, and different in their first words."""

    def __init__(self) -> None:
        self._numbers = itertools.count(10_000)

    def new(self, count: int) -> tuple[Question, ...]:
        return tuple(
            [
                Question(
                    kind="predicate",
                    instructions=f"{str(number)[::-1]}: is a parcel of this order more than a week late?",
                    options=PREDICATE_OPTIONS,
                )
                for number in itertools.islice(self._numbers, count)
            ]
        )


class Subject:
    """The ways to ask on one engine."""

    def __init__(self, engine: Engine, state: str) -> None:
        self._engine, self._state = engine, state
        self._questions, self._rids = Questions(), itertools.count()

    def one_token(self, count: int) -> list[Usage]:
        return self._all([self._request(prompt, max_tokens=1) for prompt in self._prompts(count)])

    def logprobs(self, count: int) -> list[Usage]:
        return self._all(
            [self._request(prompt, max_tokens=1, logprobs=20) for prompt in self._prompts(count)]
        )

    def logprobs_cold(self, count: int) -> list[Usage]:
        found = []
        for prompt in self._prompts(count):
            self._engine.flush_cache()
            found += self._all([self._request(prompt, max_tokens=1, logprobs=20)])
        return found

    def select(self, count: int) -> list[Usage]:
        choices = Choices(texts=(" Yes", " No"))
        return self._all(
            [self._request(prompt, max_tokens=0, choices=choices) for prompt in self._prompts(count)]
        )

    def decide(self, count: int) -> list[Usage]:
        decide = Decide(questions=self._questions.new(count), layout=LAYOUT)
        return self._all([self._request(self._state, max_tokens=0, decide=decide)])

    def warm_up(self) -> None:
        """Leave the state alone in the cache."""
        self._engine.flush_cache()
        self._all([self._request(self._state, max_tokens=0)])

    def _prompts(self, count: int) -> list[str]:
        forms = [next(iter(LAYOUTS[LAYOUT].forms(question, 1))) for question in self._questions.new(count)]
        return [f"{self._state}\n\n{''.join(map(str, form.body))}\nAnswer:" for form in forms]

    def _request(self, prompt: str, max_tokens: int, logprobs: int | None = None, **fields: Any) -> Generate:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs)
        rid = f"r{next(self._rids)}"
        return Generate(rid=rid, prompt=(prompt,), sampling=sampling, flow="bench", **fields)

    def _all(self, requests: Sequence[Generate]) -> list[Usage]:
        async def one(request: Generate) -> TextChunk:
            return [chunk async for chunk in self._engine.generate(request)][-1]

        async def every() -> list[TextChunk]:
            return await asyncio.gather(*map(one, requests))

        return [chunk.usage or Usage() for chunk in wait(every())]


class Http:
    """The same questions by ``POST /v1/decisions``."""

    def __init__(self, url: str, state: str) -> None:
        self._url, self._state, self._questions = url, state, Questions()

    def decide(self, count: int) -> list[Usage]:
        asked = [
            {"type": "predicate", "instructions": question.instructions}
            for question in self._questions.new(count)
        ]
        answer = self._post(
            "/v1/decisions", {"model": "default", "input": self._state, "questions": asked, "layout": LAYOUT}
        )
        if len(answer["answers"]) != count:
            raise RuntimeError(f"{count} questions have {len(answer['answers'])} answers")
        return [Usage(prompt_tokens=answer["usage"]["input_tokens"])]

    def flush(self) -> None:
        self._post("/flush_cache", {})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            return json.loads(response.read())


def cases_of(subject: Subject, http: Http | None, counts: Sequence[int]) -> Iterator[Case]:
    for warm in (False, True):
        yield Case("one token", subject.one_token, 1, warm)
        for count in counts:
            yield Case(f"decide {count}", subject.decide, count, warm)
            if http is not None:
                yield Case(f"http {count}", http.decide, count, warm)
    most = max(counts)
    yield Case(f"logprobs {COLD}", subject.logprobs_cold, COLD, False)
    yield Case(f"logprobs {most}", subject.logprobs, most, True)
    yield Case(f"select {most}", subject.select, most, True)


Found = dict[tuple[str, bool], list[float]]


def measured(
    engine: Engine, subject: Subject, http: Http | None, cases: Sequence[Case], rounds: int
) -> tuple[Found, Found]:
    """The seconds of each case, and the seconds of its forward passes."""
    walls: Found = {}
    passes: Found = {}
    for round_ in range(rounds + 1):  # the first round compiles kernels, and is not counted
        for case in cases:
            ready(engine, subject, http, case)
            before = engine.stats()
            began = time.perf_counter()
            usages = case.run(case.questions)
            wall = time.perf_counter() - began
            after = engine.stats()
            computed = after.computed_tokens - before.computed_tokens
            model_s = after.model_s - before.model_s
            kind = "warm" if case.warm else "cold"
            print(
                f"{kind} {case.name}: {wall:.3f} s, {model_s:.3f} s in passes, {computed} tokens", flush=True
            )
            if case.name.startswith("decide"):
                told = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
                if computed != told:
                    print(f"    WRONG: the usage says {told} computed tokens")
            if round_:
                walls.setdefault((case.name, case.warm), []).append(wall)
                passes.setdefault((case.name, case.warm), []).append(wall - model_s)
    return walls, passes


def ready(engine: Engine, subject: Subject, http: Http | None, case: Case) -> None:
    if case.name.startswith("http") and http is not None:
        http.flush()
        if case.warm:
            http.decide(1)
    elif case.warm:
        subject.warm_up()
    else:
        engine.flush_cache()
    time.sleep(0.3)  # the threads of the last case spin for a while


def print_table(walls: Found, beyond: Found, counts: Sequence[int]) -> None:
    def median(name: str, warm: bool = False) -> float:
        return statistics.median(walls[name, warm])

    print("\ncase                  median s [least, most]")
    for (name, warm), times in walls.items():
        spread = f"[{min(times):.3f}, {max(times):.3f}]"
        print(f"{'warm' if warm else 'cold'} {name:<16} {statistics.median(times):8.3f} {spread}")
    most = max(counts)
    print("\nratio                                               value   to hold")
    rows = [("cold decide 1 / one token", median("decide 1") / median("one token"), "<= 1.05")]
    if 16 in counts:
        rows.append(("cold decide 16 / decide 1", median("decide 16") / median("decide 1"), "<= 1.5"))
    rows += [
        (f"cold decide {most} / decide 1", median(f"decide {most}") / median("decide 1"), "<= 8 (400)"),
        (
            f"warm logprobs {most} / decide {most}",
            median(f"logprobs {most}", True) / median(f"decide {most}", True),
            ">= 2",
        ),
        (
            f"warm select {most} / decide {most}",
            median(f"select {most}", True) / median(f"decide {most}", True),
            "",
        ),
        (
            f"cold logprobs / decide {most}, a question",
            median(f"logprobs {COLD}") / COLD / (median(f"decide {most}") / most),
            ">= 50",
        ),
    ]
    for name, value, target in rows:
        print(f"{name:<50} {value:>7.2f}   {target}")
    pass_ms = statistics.median(beyond["decide 1", True]) * 1e3
    print(f"{'warm question, ms beyond the pass':<50} {pass_ms:>7.2f}   <= 2")
    print(f"{'questions/s, warm':<50} {most / median(f'decide {most}', True):>7.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--state", type=int, default=4000, help="tokens of the state, about (4000)")
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 16, 400])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help="also ask a server over HTTP")
    args = parser.parse_args()
    state = state_of(args.state)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine(args.model, speculation=False))
        http = Http(stack.enter_context(serve("--model", args.model)).url, state) if args.serve else None
        subject = Subject(engine, state)
        cases = list(cases_of(subject, http, sorted(args.questions)))
        walls, beyond = measured(engine, subject, http, cases, args.rounds)
    print_table(walls, beyond, sorted(args.questions))


if __name__ == "__main__":
    main()
