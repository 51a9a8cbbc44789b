"""Preambles in a running scheduler: forced, or free up to a limit, with and without a constraint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify.constraint import Constraint, regex, structural_tag
from ramify.engine_messages import CompileGrammar, Submit
from ramify.errors import InvalidRequest
from ramify.grammar.compile.child_jobs import answer
from ramify.messages import Continuation, Preamble
from ramify.runtime.model.tokenizer.tokenizer import load_vocabulary
from ramify.runtime.scheduler.grammars import GrammarStore
from ramify.sampling_params import SamplingParams
from tests.runtime.local import LocalScheduler, Result
from tests.runtime.tiny import END_ID, VOCAB

PROMPT = tuple(b"a prompt of bytes")
DIGITS = regex("[0-9]{3}")


class Thinking(LocalScheduler):
    """A scheduler whose grammars compile at once, in this process. Each token of the tiny model is one
    byte."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.vocabulary = load_vocabulary(folder, vocab_size=VOCAB, stop_ids=[END_ID])
        self.ids = {spelling: token for token, spelling in enumerate(self.vocabulary.tokens) if spelling}
        self.jobs: list[CompileGrammar] = []
        store = GrammarStore(self.vocabulary, send=self.jobs.append, restart=lambda: None)
        super().__init__(folder, grammars=store, **options)

    def ask(
        self,
        *preambles: Preamble,
        constraint: Constraint | None = None,
        continues: Continuation | None = None,
        cut_to_fit: bool = False,
        **sampling: Any,
    ) -> Result:
        rid = f"t{len(self.results)}"
        self.results[rid] = Result()
        known = tuple(
            Preamble(
                end=one.end,
                max_tokens=one.max_tokens,
                optional=one.optional,
                apart=one.apart,
                counted=one.counted,
                end_ids=tuple(self.ids[bytes([byte])] for byte in one.end.encode()),
            )
            for one in preambles
        )
        options = SamplingParams(**{"temperature": 0.0, "max_tokens": 40} | sampling).check()
        self.scheduler.receive(
            Submit(
                rid=rid,
                ids=PROMPT,
                sampling=options,
                constraint=constraint,
                preambles=known,
                continues=continues,
                cut_to_fit=cut_to_fit,
            )
        )
        for job in self.jobs:
            self.scheduler.receive(answer(job, self.vocabulary))
        self.jobs.clear()
        self.run()
        return self.results[rid]

    def text(self, result: Result) -> str:
        spelled = b"".join(self.vocabulary.tokens[token] for token in result.ids)
        return spelled.decode(errors="replace")


@pytest.fixture(params=[True, False], ids=["jumping", "token by token"])
def local(tiny_folder: Path, request: pytest.FixtureRequest) -> Thinking:
    return Thinking(tiny_folder, jump_forward=request.param)


@pytest.mark.parametrize("logprobs", [None, 0])
def test_what_was_forced_is_told_token_by_token(tiny_folder: Path, logprobs: int | None) -> None:
    local = Thinking(tiny_folder, jump_forward=True)
    result = local.ask(constraint=regex("begin [0-9] end"), logprobs=logprobs)
    text = local.text(result)
    assert text.startswith("begin ")
    digit = text.index(next(filter(str.isdigit, text)))  # the tokens are bytes
    assert digit not in result.forced
    assert result.usage is not None
    assert len(result.forced) == len(set(result.forced)) == result.usage.forced_tokens > 3
    assert max(result.forced) < len(result.ids)
    plain = Thinking(tiny_folder, jump_forward=False).ask(constraint=regex("begin [0-9] end"))
    assert plain.forced == []


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_limit_of_nothing_forces_the_end_at_once(local: Thinking, logprobs: int | None) -> None:
    result = local.ask(Preamble(end="</x>", max_tokens=0), constraint=DIGITS, logprobs=logprobs)
    text = local.text(result)
    assert text.startswith("</x>")
    assert text[4:].isdigit()
    assert len(text) == 7
    assert result.finish is not None
    assert result.finish.reason == "stop"


@pytest.mark.parametrize("limit", [1, 6])
def test_the_free_part_is_the_models_own(local: Thinking, limit: int) -> None:
    """Up to its limit, a preamble is the model's unconstrained output, apart from control tokens."""
    banned = {"logit_bias": dict.fromkeys(range(256, VOCAB), -100.0)}
    free = local.ask(max_tokens=limit, **banned)
    result = local.ask(Preamble(end="</x>", max_tokens=limit), constraint=DIGITS, **banned)
    assert result.ids[:limit] == free.ids
    before, end, answer = local.text(result).partition("</x>")
    assert end
    assert before.encode(errors="replace")
    assert len(answer) == 3
    assert answer.isdigit()


@pytest.mark.parametrize("budget", [7, 8, 12, 30])
def test_room_is_left_for_the_answer(local: Thinking, budget: int) -> None:
    for temperature in (0.0, 2.0):
        result = local.ask(
            Preamble(end="</x>"), constraint=DIGITS, max_tokens=budget, temperature=temperature, seed=budget
        )
        _, end, answer = local.text(result).partition("</x>")
        assert (end, len(answer), answer.isdigit()) == ("</x>", 3, True)
        assert result.finish is not None
        assert result.finish.reason == "stop"


def test_a_budget_without_room_is_refused(local: Thinking) -> None:
    result = local.ask(Preamble(end="</x>"), constraint=DIGITS, max_tokens=6)
    assert isinstance(result.error, InvalidRequest)
    assert result.error.field == "max_tokens"


def test_free_text_after_the_reasoning_is_cut_where_its_tokens_end(local: Thinking) -> None:
    result = local.ask(Preamble(end="</x>", max_tokens=2), max_tokens=12, ignore_eos=False)
    assert "</x>" in local.text(result)
    assert result.finish is not None
    assert result.finish.reason == ("length" if len(result.ids) == 12 else "stop")


def test_optional_text_may_be_all(local: Thinking) -> None:
    """A bias makes the model stop: the output lacks the end mark, and so the answer."""
    result = local.ask(Preamble(end="</x>", optional=True), constraint=DIGITS, logit_bias={END_ID: 100.0})
    assert result.ids == [END_ID]
    assert result.finish is not None
    assert result.finish.reason == "stop"
    required = local.ask(Preamble(end="</x>"), constraint=DIGITS, logit_bias={END_ID: 100.0}, max_tokens=20)
    assert local.text(required)[-3:].isdigit()


THOUGHTS = (Preamble(end="</x>", max_tokens=9, apart=True), Preamble(end="..", max_tokens=0, apart=True))


@pytest.mark.parametrize("thought", [0, 9])
@pytest.mark.parametrize("most", [1, 5])
def test_tokens_behind_what_is_apart_are_counted_from_there(local: Thinking, thought: int, most: int) -> None:
    first, gap = THOUGHTS
    first = Preamble(end=first.end, max_tokens=thought, apart=True)
    result = local.ask(first, gap, max_tokens=most, logit_bias={END_ID: -100.0})
    assert len(result.ids) == thought + len("</x>..") + most
    assert "</x>.." in local.text(result)
    assert result.finish is not None
    assert result.finish.reason == "length"


def test_the_answers_own_limit_holds_it_whole(local: Thinking) -> None:
    result = local.ask(*THOUGHTS, constraint=DIGITS, max_tokens=3)
    _, _, answer = local.text(result).partition("</x>..")
    assert list(result.ids[9 : 9 + len("</x>..")]) == [local.ids[bytes([one])] for one in b"</x>.."]
    assert len(answer) == 3
    assert answer.isdigit()
    refused = local.ask(*THOUGHTS, constraint=DIGITS, max_tokens=2)
    assert isinstance(refused.error, InvalidRequest)
    assert "has 3 tokens; max_tokens is 2" in str(refused.error)


def test_the_least_number_of_tokens_is_the_answers(local: Thinking) -> None:
    """A bias makes the model stop as soon as it may."""
    result = local.ask(*THOUGHTS, max_tokens=20, min_tokens=4, logit_bias={END_ID: 100.0})
    *thoughts, end = result.ids
    assert end == END_ID
    assert len(thoughts) == 9 + len("</x>..") + 4


def test_no_least_number_is_lost_without_a_limit(local: Thinking) -> None:
    result = local.ask(*THOUGHTS, max_tokens=None, min_tokens=4, logit_bias={END_ID: 100.0})
    assert len(result.ids) == 9 + len("</x>..") + 4 + 1


def test_stop_tokens_end_the_answer_alone(local: Thinking) -> None:
    """A bias makes the model write one token, which the end mark contains as well."""
    for wanted in (".", "x"):
        stop = local.ids[wanted.encode()]
        result = local.ask(*THOUGHTS, max_tokens=20, stop_token_ids=(stop,), logit_bias={stop: 100.0})
        assert local.text(result) == f"{wanted * 9}</x>..{wanted}"
        assert result.finish is not None
        assert (result.finish.reason, result.finish.matched) == ("stop", stop)
    words = structural_tag(
        {
            "type": "structural_tag",
            "format": {"type": "tag", "begin": "abc", "content": {"type": "any_text"}, "end": "."},
        }
    )
    forced = local.ask(*THOUGHTS, constraint=words, stop_token_ids=(local.ids[b"b"],))
    assert local.text(forced).endswith("</x>..ab")


def test_what_is_counted_counts_though_it_is_apart(local: Thinking) -> None:
    """`max_tokens` counts thoughts and answer. Stop tokens and `min_tokens` concern only the answer."""
    counted = Preamble(end="</x>", max_tokens=9, apart=True, counted=True)
    for first in (counted, Preamble(end="</x>", apart=True, counted=True)):
        result = local.ask(first, max_tokens=30, logit_bias={END_ID: -100.0})
        assert len(result.ids) == 30
    result = local.ask(counted, max_tokens=30, min_tokens=3, logit_bias={END_ID: 100.0})
    assert len(result.ids) == 9 + len("</x>") + 3 + 1
    refused = local.ask(counted, constraint=DIGITS, max_tokens=6)
    assert isinstance(refused.error, InvalidRequest)
    stop = local.ids[b"e"]
    ended = local.ask(counted, max_tokens=30, stop_token_ids=(stop,), logit_bias={stop: 100.0})
    assert local.text(ended) == "e" * 9 + "</x>e"


@pytest.mark.parametrize("constraint", [None, DIGITS])
@pytest.mark.parametrize("thoughts", [4, 100])
def test_thoughts_and_answer_share_the_bound(
    tiny_folder: Path, thoughts: int, constraint: Constraint | None
) -> None:
    local = Thinking(tiny_folder, max_output_tokens=12)
    thought = Preamble(end="</t>", max_tokens=thoughts, apart=True)
    result = local.ask(thought, constraint=constraint, cut_to_fit=True, ignore_eos=constraint is None)
    assert len(result.ids) <= 12
    before, end, answer = local.text(result).partition("</t>")
    assert end
    assert len(before) <= thoughts
    assert constraint is None or (answer.isdigit() and len(answer) == 3)


def test_a_bound_below_the_shortest_thought_and_answer_is_refused(tiny_folder: Path) -> None:
    local = Thinking(tiny_folder, max_output_tokens=6)
    thought = Preamble(end="</t>", max_tokens=100, apart=True)
    error = local.ask(thought, constraint=DIGITS, cut_to_fit=True).error
    assert isinstance(error, InvalidRequest)
    assert "has 3 tokens; max_tokens is 2" in error.message
