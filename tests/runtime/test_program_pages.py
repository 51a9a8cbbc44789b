"""Programs on a scheduler: nothing is computed twice, hints keep needed pages, and usage reports it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ramify.engine_messages import AwaitTools, EndProgram, FlushCache
from ramify.messages import ProgramHint, Usage
from ramify.runtime.scheduler.requests.programs import MAX_KINDS, ProgramIntervals, ReuseIntervals
from tests.runtime.local import LocalScheduler
from tests.runtime.test_scheduler import prompt_of


class Told:
    """The requests of a program, with their tokens and usage."""

    def __init__(self, local: LocalScheduler, program: str = "p", hints: bool = True) -> None:
        self.local = local
        self.program = program
        self._hints = hints
        self.usages: list[Usage] = []

    def call(self, *prompts: list[int], max_tokens: int = 4, **options: Any) -> list[list[int]]:
        """Run requests that arrive together; returns the tokens of each, prompt and output."""
        hint = {
            name: options.pop(name) for name in ("next_use", "branch", "forks", "ended") if name in options
        }
        told = ProgramHint(program=self.program, name="told", lease_s=60.0, **hint) if self._hints else None
        rids = [
            self.local.submit(prompt, max_tokens=max_tokens, hint=told, ignore_eos=True, **options)
            for prompt in prompts
        ]
        self.local.run()
        found = []
        for rid, prompt in zip(rids, prompts, strict=True):
            result = self.local.results[rid]
            assert result.usage is not None, result.error
            self.usages.append(result.usage)
            found.append([*prompt, *result.ids])
        return found

    @property
    def computed(self) -> int:
        return sum(usage.prompt_tokens - usage.cached_tokens for usage in self.usages)

    @property
    def distinct(self) -> int:
        return sum(usage.distinct_tokens for usage in self.usages)

    @property
    def lost(self) -> int:
        return sum(usage.evicted_tokens for usage in self.usages)


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_what_is_computed_are_the_distinct_tokens(tiny_model: Any, page_size: int) -> None:
    told = Told(LocalScheduler(tiny_model, page_size=page_size, num_pages=2048 // page_size))
    (held,) = told.call(prompt_of(50))
    for turn in range(5):  # a conversation
        (held,) = told.call([*held, *prompt_of(7, turn)])
    assert told.computed == told.distinct == 50 + 5 * (7 + 1), "the last token of an answer is not computed"
    branches = told.call(*([*held, *prompt_of(9, seed)] for seed in range(10, 14)))  # a fork
    for branch in branches[:2]:  # forks of branches, and a join
        told.call(*([*branch, *prompt_of(5, seed)] for seed in range(20, 23)))
    joined = [token for branch in branches for token in branch[len(held) :]]
    told.call([*held, *joined])
    assert told.computed == told.distinct
    assert told.lost == 0


def test_a_known_prompt_costs_the_token_whose_logits_are_needed(tiny_model: Any) -> None:
    """Of five samples of one prompt, all but the first compute only the prompt's last token again."""
    told = Told(LocalScheduler(tiny_model))
    told.call(*[prompt_of(40)] * 5)
    assert told.distinct == 40
    assert told.computed == 40 + 4
    told.call(prompt_of(40), max_tokens=0)
    assert told.computed == 40 + 4


def test_what_another_program_has_computed_is_distinct_and_cached(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    Told(local, "one").call(prompt_of(40))
    other = Told(local, "two")
    other.call(prompt_of(40))
    assert (other.distinct, other.computed) == (40, 1)
    plain = local.complete([prompt_of(40)], max_tokens=1)[0].usage
    assert plain is not None
    assert plain.distinct_tokens == 40


@pytest.mark.parametrize("seed", range(3))
def test_it_holds_for_any_tree_of_calls(tiny_model: Any, seed: int) -> None:
    dice = random.Random(seed)
    told = Told(LocalScheduler(tiny_model, page_size=dice.choice((3, 8)), num_pages=400, chunk_tokens=48))
    held = [prompt_of(20, seed)]
    for _ in range(12):
        prompts = []
        for _ in range(dice.randrange(1, 4)):
            known = dice.choice(held)
            prompts.append(
                [*known[: dice.randrange(1, len(known) + 1)], *prompt_of(6, dice.randrange(10**6))]
            )
        if max(map(len, prompts)) > 200:
            break
        held += told.call(*prompts, max_tokens=dice.randrange(1, 5))
    logits = sum(usage.distinct_tokens == 0 for usage in told.usages)
    assert told.lost == 0
    assert told.computed == told.distinct + logits


def test_it_is_told_who_evicted(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, page_size=4, num_pages=40)
    told = Told(local)
    told.call(prompt_of(80), next_use="never")
    plain = local.submit(prompt_of(120, 1), max_tokens=1)
    local.run()
    told.call(prompt_of(80))
    usage = told.usages[-1]
    assert usage.evicted_by == plain
    assert usage.evicted_tokens == 79 - usage.cached_tokens > 20
    assert told.computed == told.distinct + told.lost + 1, "the last token is computed in any case"
    after = local.complete([prompt_of(120, 1)], max_tokens=1)[0].usage
    assert after is not None
    assert after.evicted_by == "told p"
    local.scheduler.receive(FlushCache(rid="f"))
    told.call(prompt_of(80))
    assert told.usages[-1].evicted_by == "flush"
    assert told.usages[-1].evicted_tokens == 79


def agents(local: LocalScheduler, hints: bool) -> tuple[list[Told], list[list[int]]]:
    """Run two agents in turn. While their tools run, requests without a program come and go."""
    programs = [Told(local, f"agent{number}", hints) for number in range(2)]
    held = [prompt_of(100, number) for number in range(2)]
    for turn in range(6):
        for number, program in enumerate(programs):
            (held[number],) = program.call(held[number], next_use="tool", branch="b")
            if hints:
                local.scheduler.receive(AwaitTools(program=program.program, branch="b", tools=("search",)))
            held[number] += prompt_of(6, 100 * turn + number)
            local.complete([prompt_of(60, 1000 + 10 * turn + number)], max_tokens=2)
    for program in programs:
        local.scheduler.receive(EndProgram(program=program.program))
    assert local.cache.counts().leased == 0
    return programs, held


def test_with_hints_an_engine_short_of_pages_computes_at_most_half_as_much_again(tiny_model: Any) -> None:
    """The same programs run with and without hints. There are few more pages than the programs need."""
    again = {}
    texts = {}
    for hints in (False, True):
        local = LocalScheduler(tiny_model, page_size=4, num_pages=88)
        programs, texts[hints] = agents(local, hints)
        needed = sum(100 + 5 * 7 for _ in programs)
        again[hints] = sum(program.computed for program in programs) - needed
        assert sum(program.lost for program in programs) == again[hints]
    assert texts[True] == texts[False]
    assert again[False] > 100
    assert again[True] <= again[False] / 2


def test_what_the_branches_of_a_fork_share_is_kept_for_the_join(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, page_size=4, num_pages=80)
    told = Told(local)
    trunk = prompt_of(120)
    told.call(
        *([*trunk, *prompt_of(8, seed)] for seed in range(4)), forks=("f",), branch="", next_use="never"
    )
    local.complete([prompt_of(100, 50)], max_tokens=1)
    local.complete([prompt_of(100, 51)], max_tokens=1)
    told.call([*trunk, *prompt_of(8, 9)], branch="root", ended=("f",))
    assert told.usages[-1].cached_tokens == 120
    assert told.computed == told.distinct


def test_leases_hold_nobody_up(tiny_model: Any) -> None:
    """Another request runs although all pages are leased and needed at once."""
    local = LocalScheduler(tiny_model, page_size=4, num_pages=60)
    for number in range(4):
        Told(local, f"p{number}").call(prompt_of(50, number), next_use="soon", branch="b")
    assert local.cache.counts().leased > 40
    result = local.complete([prompt_of(150, 9)], max_tokens=20, ignore_eos=True)[0]
    assert len(result.ids) == 20


def test_a_program_remembers_a_bounded_number_of_branches_and_tools() -> None:
    intervals, own = ReuseIntervals(), ProgramIntervals()
    for turn in range(MAX_KINDS + 5):
        intervals.begin_interval(own, "branch", "soon", now=float(turn))
        intervals.set_kind(own, "branch", f"tool {turn}")
        assert list(own.open) == ["branch"]
        intervals.end_interval(own, "branch", now=turn + 0.5)
    assert len(own.means) == MAX_KINDS


def test_branches_that_have_ended_are_forgotten(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    told = Told(local)
    for turn in range(3):
        told.call(prompt_of(9, turn), branch=f"b{turn}", next_use="soon", ended=(f"b{turn - 1}",))
    program = local.scheduler.requests.programs.find("p")
    assert program is not None
    assert list(program.intervals.open) == ["b2"]
