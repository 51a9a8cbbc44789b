"""Overlap scheduling changes no token: mixed loads with and without it, and a pass computed ahead in vain."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ramify import constraint
from ramify.engine_messages import Abort
from ramify.grammar.compile.child_jobs import answer
from ramify.grammar.retokenize import Retokenizer
from ramify.grammar.vocabulary import Vocabulary
from ramify.runtime.scheduler.grammars import GrammarStore
from ramify.runtime.scheduler.requests.constrained import Healer
from tests.runtime.local import LocalScheduler, Result
from tests.runtime.tiny import END_ID, VOCAB

TOKENS = tuple(bytes([i]) for i in range(256)) + (b"",) * (VOCAB - 257) + (b"ng",)
N, NG = ord("n"), VOCAB - 1
WORDS = {
    "type": "object",
    "properties": {"name": {"enum": ["long name", "long other"]}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def spelled(text: str) -> list[int]:
    """The ids of `text`: its bytes, except that "ng" is one token."""
    ids: list[int] = []
    for byte in text.encode():
        if byte == ord("g") and ids[-1:] == [N]:
            ids[-1] = NG
        else:
            ids.append(byte)
    return ids


class Load:
    """Requests of every kind, at chosen steps. Stop strings and clients abort some of them."""

    def __init__(self, model: Any, *, overlap: bool, seed: int, longest: int = 14, **options: Any) -> None:
        self.longest = longest
        vocabulary = Vocabulary(TOKENS, (END_ID,))
        self.jobs: list[Any] = []
        self.vocabulary = vocabulary
        self.local = LocalScheduler(
            model,
            overlap=overlap,
            deterministic=True,  # or the batch, which is another, would change the last bits
            grammars=GrammarStore(vocabulary, send=self.jobs.append, restart=lambda: None),
            retokenizer=Retokenizer(spelled, vocabulary),
            healer=Healer(vocabulary),
            **options,
        )
        self.random = random.Random(seed)
        self.trunk = [self.random.randrange(256) for _ in range(60)]

    def submit(self, kind: int) -> str:
        rng = self.random
        ids = self.trunk[: rng.randrange(1, 60)] + [rng.randrange(256) for _ in range(rng.randrange(1, 12))]
        more: list[dict[str, Any]] = [
            {},
            {"temperature": 1.0, "seed": rng.randrange(99), "top_p": 0.9},
            {"temperature": 0.8, "seed": 5, "min_p": 0.02, "frequency_penalty": 0.7, "logprobs": 2},
            {"repetition_penalty": 1.3, "presence_penalty": 0.2, "logit_bias": {65: 1.5}},
            {"constraint": constraint.json_schema(WORDS), "max_tokens": 40},
            {"constraint": constraint.regex("[ab]{3}(forced text)?[0-9]+"), "logprobs": 1},
            {"logprobs": 1, "prompt_logprobs_start": 2},
            {"stop_token_ids": tuple(range(0, 256, 9)), "min_tokens": 2},
            {"open_end": True},
            {"max_tokens": 1},
            # An "n" that is chosen becomes "ng", one token: what was computed ahead is not what comes.
            {"constraint": constraint.regex("(ng|x)[0-9]{3,9}"), "logit_bias": {N: 50.0, NG: -50.0}},
        ]
        options = {
            "max_tokens": rng.randrange(2, self.longest),
            "ignore_eos": "constraint" not in more[kind],
            **more[kind],
        }
        return self.local.submit(ids, **options)

    def run(self) -> list[Result]:
        scheduler = self.local.scheduler
        kinds = [*range(11)] * 2
        self.random.shuffle(kinds)
        step, submitted = 0, []
        while kinds or scheduler.busy:
            for _ in range(self.random.choice((0, 0, 1, 3)) if kinds else 0):
                if kinds:
                    submitted.append(self.submit(kinds.pop()))
            while self.jobs:
                scheduler.receive(answer(self.jobs.pop(), self.vocabulary))
            # A stop string is seen some steps after its token; what is cut off then is not compared.
            if step in (9, 17, 30) and submitted:
                scheduler.receive(Abort(rid=submitted[len(submitted) // 2], silent=False))
            self.local.step()
            step += 1
            assert step < 2000
        return [self.local.results[rid] for rid in submitted]


def told(result: Result) -> Any:
    error = None if result.error is None else result.error.message
    return result.ids, result.logprobs, result.prompt_logprobs, result.finish, error, result.overlap


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 4, "num_pages": 36, "chunk_tokens": 16, "longest": 50},
        {"jump_forward": False, "prefix_cache": "naive"},
    ],
    ids=["plain", "short-of-pages", "no-jumps"],
)
def test_the_same_tokens(tiny_folder: Path, options: Any) -> None:
    without = Load(tiny_folder, overlap=False, seed=1, **options)
    expected = without.run()
    with_ = Load(tiny_folder, overlap=True, seed=1, **options)
    passes: list[Any] = []
    with_.local.runner.before_pass = passes.append
    found = with_.run()
    assert [told(result) for result in found] == [told(result) for result in expected]
    counters = with_.local.scheduler.counters
    in_step = sum(batch.next_ids is None for batch in passes)
    assert counters.steps - in_step > 10, "all rows of these steps were computed ahead"
    if "num_pages" in options:
        assert counters.retractions > 0
    assert with_.local.cache.counts().in_use == 0


def test_choosing_again_keeps_what_was_launched(tiny_folder: Path) -> None:
    """A step samples again for the healed request, after the pass of the other request was launched."""
    healed = [*b"xyzn"]

    def answers(*, overlap: bool) -> list[Any]:
        load = Load(tiny_folder, overlap=overlap, seed=1)
        rids = [
            load.local.submit(healed, open_end=True, max_tokens=6, ignore_eos=True, logit_bias={N: 50.0}),
            load.local.submit([*b"plain"], max_tokens=6, ignore_eos=True),
        ]
        load.local.run()
        return [told(load.local.results[rid]) for rid in rids]

    expected = answers(overlap=False)
    assert [error for *_, error, _ in expected] == [None, None]
    assert answers(overlap=True) == expected
