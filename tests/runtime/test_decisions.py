"""Questions about one state in one request: exact scores, the least work, and equal bits in any company."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ramify.engine_messages import Abort, DecisionForm, DecisionTokens, WrittenQuestion
from ramify.errors import EngineError, InvalidRequest, PromptTooLong
from ramify.questions import DecisionScores, FormScores
from ramify.runtime.scheduler.admission import HighestResponseRatioNext
from tests.runtime.local import LocalScheduler, Result
from tests.runtime.test_scheduler import prompt_of

Paths = Sequence[Sequence[int]]
Asked = tuple[list[int], list[list[int]]]
"""The ids of a form, and its paths."""

SALE = [[20], [20, 21], [20, 21, 22], [20, 30, 31], [40, 41], [50]]
"""Paths that begin others, and paths that share beginnings."""


def decide(*asked: Asked, ends: Sequence[int] = (), prompt_ids: bool = False) -> DecisionTokens:
    """A question with one form for each of `asked`."""
    return DecisionTokens(
        questions=tuple(
            WrittenQuestion(
                layout="verbatim-1",
                forms=(
                    DecisionForm(
                        ids=tuple(ids),
                        paths=tuple(map(tuple, paths)),
                        options=tuple(range(len(paths))),
                    ),
                ),
            )
            for ids, paths in asked
        ),
        ends=tuple(ends),
        prompt_ids=prompt_ids,
    )


def forms_of(scores: DecisionScores | None) -> list[FormScores]:
    assert scores is not None
    return [form for question in scores.questions for form in question.forms]


def answered(local: LocalScheduler, state: Sequence[int], decided: DecisionTokens, **more: Any) -> Result:
    rid = local.submit(state, decide=decided, max_tokens=0, **more)
    local.run()
    result = local.results[rid]
    assert result.error is None, result.error
    assert result.finish is not None
    assert result.finish.reason == "length"
    return result


def logprobs(local: LocalScheduler, state: Sequence[int], *asked: Asked, **more: Any) -> list[list[float]]:
    """The log-probabilities of each form's paths."""
    options = {name: more.pop(name) for name in ("ends",) if name in more}
    result = answered(local, state, decide(*asked, **options), **more)
    return [list(form.logprobs) for form in forms_of(result.decisions)]


def exact(
    model: Any,
    before: Sequence[int],
    paths: Paths,
    ends: Sequence[int] = (),
    some: Sequence[int] = (),
    at_once: int = 6,
) -> list[float]:
    """By plain passes of transformers over each path: the sum over its tokens, and the mass of its end.

    some : indices of the paths that are scored; empty for all
    """
    scored = [paths[index] for index in some] if some else paths
    longest = max(map(len, scored))
    found = []
    for first in range(0, len(scored), at_once):
        group = scored[first : first + at_once]
        with torch.inference_mode():  # what is behind a path does not change its logits
            ids = torch.tensor([[*before, *path, *[0] * (longest - len(path))] for path in group])
            tables = model(input_ids=ids).logits.log_softmax(-1)
        for path, whole in zip(group, tables, strict=True):
            table, size = whole[: len(before) + len(path)].double(), len(path)
            value = sum(float(table[len(before) + i - 1, token]) for i, token in enumerate(path))
            longer = {other[size] for other in paths if len(other) > size and [*other][:size] == [*path]}
            if ends:
                value += float(table[-1, list(ends)].logsumexp(0))
            elif longer:
                others = [token for token in range(table.shape[1]) if token not in longer]
                value += float(table[-1, others].logsumexp(0))
            found.append(value)
    return found


def near(values: Sequence[float]) -> Any:
    """Equal to `values`, as far as float32 allows: a float32 near 50 has steps of 4e-6."""
    return pytest.approx(values, rel=1e-5, abs=1e-5)


def many_paths(rng: random.Random, count: int) -> list[list[int]]:
    """Different paths of up to four tokens, of which many share beginnings or begin others."""
    found: set[tuple[int, ...]] = set()
    while len(found) < count:
        found.add(tuple(rng.randrange(7) for _ in range(rng.randint(1, 4))))
    return [list(path) for path in rng.sample(sorted(found), count)]


def idle(local: LocalScheduler) -> bool:
    counts, states = local.cache.counts(), local.cache.state_counts()
    return not local.scheduler.busy and counts.in_use == counts.leased == states.in_use == 0


@pytest.mark.parametrize("ends", [(), (256, 9)])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_scores_are_those_of_a_plain_pass_per_path(
    tiny_model: Any, tiny_oracle: Any, page_size: int, ends: tuple[int, ...]
) -> None:
    rng = random.Random(page_size)
    local = LocalScheduler(tiny_model, page_size=page_size, num_pages=2048 // page_size, chunk_tokens=40)
    for length in (0, 1, 37):
        state = prompt_of(length, length)
        asked: list[Asked] = [(prompt_of(9, 1), SALE), (prompt_of(1, 2), [[3], [4]])]
        asked += [(prompt_of(rng.randint(1, 50), n), many_paths(rng, rng.randint(1, 20))) for n in range(2)]
        found = logprobs(local, state, *asked, ends=ends)
        for (ids, paths), values in zip(asked, found, strict=True):
            assert values == near(exact(tiny_oracle, state + ids, paths, ends))
        assert idle(local)


def test_scores_are_as_exact_as_float32_allows(tiny_folder: Any, tiny_oracle: Any) -> None:
    """As near to float64 as the passes of transformers in float32 are."""
    from transformers import AutoModelForCausalLM

    double = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64).eval()
    local, rng = LocalScheduler(tiny_folder), random.Random(5)
    ours, theirs = [], []
    for n in range(20):
        state, ids, paths = prompt_of(rng.randint(1, 90), n), prompt_of(9, n), many_paths(rng, 12)
        (found,) = logprobs(local, state, (ids, paths))
        wanted = exact(double, state + ids, paths)
        assert found == near(wanted)
        ours += [abs(one - value) for one, value in zip(found, wanted, strict=True)]
        single = exact(tiny_oracle, state + ids, paths)
        theirs += [abs(one - value) for one, value in zip(single, wanted, strict=True)]
    assert 0 < sum(ours) < 1.5 * sum(theirs)
    assert max(ours) < 1.5 * max(theirs)


def test_paths_may_follow_the_state_at_once(tiny_model: Any, tiny_oracle: Any) -> None:
    local, state = LocalScheduler(tiny_model), prompt_of(33)
    found = logprobs(local, state, ([], SALE), ([7, 8], [[1], [2]]))
    assert found[0] == near(exact(tiny_oracle, state, SALE))
    assert found[1] == near(exact(tiny_oracle, [*state, 7, 8], [[1], [2]]))


def test_the_mass_that_leaves_longer_paths_is_small_but_exact(tiny_model: Any, tiny_oracle: Any) -> None:
    """All tokens but one go on with longer paths. 1 - p would have no correct digit."""
    local, state, vocabulary = LocalScheduler(tiny_model, num_pages=512), prompt_of(20), 320
    paths = [[5], *([5, token] for token in range(vocabulary) if token != 77)]
    (found,) = logprobs(local, state, ([6], paths))
    some = [0, 1, 78, 318]
    assert [found[path] for path in some] == near(exact(tiny_oracle, [*state, 6], paths, some=some))
    assert found[0] < -5


def test_many_questions_are_many_waves_and_one_answer(tiny_model: Any, tiny_oracle: Any) -> None:
    local, state = LocalScheduler(tiny_model, chunk_tokens=64, max_running=16), prompt_of(100)
    paths = [[a, b] for a in range(16) for b in range(16)][:255]
    asked: list[Asked] = [([n, 7, n % 9], paths) for n in range(40)]
    found = logprobs(local, state, *asked)
    for place in (0, 17, 39):
        some = [*range(0, 255, 40), 254]
        wanted = exact(tiny_oracle, state + asked[place][0], [paths[path] for path in some])
        assert [found[place][path] for path in some] == near(wanted)
    stats = local.scheduler.stats()
    assert stats.computed_tokens == 100 + 40 * (3 + 16)
    assert stats.steps >= 40 * 16 / 16
    assert idle(local)


@pytest.mark.parametrize("ends", [(), (256,)])
def test_every_token_is_computed_once_and_none_of_a_known_state(tiny_model: Any, ends: tuple[int]) -> None:
    local, state = LocalScheduler(tiny_model), prompt_of(50)
    asked: list[Asked] = [(prompt_of(9, n), SALE) for n in range(5)]
    # Of SALE: 20, 20 21, 20 30 and 40 are followed by tokens. With ends, all eight beginnings are computed.
    own = 5 * (9 + (8 if ends else 4))
    for cached in (0, 50):
        before = local.scheduler.stats()
        result = answered(local, state, decide(*asked, ends=ends))
        after = local.scheduler.stats()
        assert after.computed_tokens - before.computed_tokens == 50 - cached + own
        assert after.prompt_tokens - before.prompt_tokens == 50 + own
        usage = result.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (50 + own, cached, 0)
    assert idle(local)


def test_without_sharing_a_known_state_is_computed_again(tiny_model: Any) -> None:
    local, state = LocalScheduler(tiny_model, prefix_cache="naive"), prompt_of(50)
    for _ in range(2):
        before = local.scheduler.stats().computed_tokens
        answered(local, state, decide(([1, 2], [[3], [4]])))
        assert local.scheduler.stats().computed_tokens - before == 52


def test_a_warm_question_takes_one_step(tiny_model: Any) -> None:
    local, state = LocalScheduler(tiny_model), prompt_of(50)
    for steps in (2, 1):
        before = local.scheduler.stats().steps
        answered(local, state, decide(*(([1, n], [[3], [4]]) for n in range(8))))
        assert local.scheduler.stats().steps - before == steps


def test_the_answer_names_what_was_asked(tiny_model: Any) -> None:
    local, state = LocalScheduler(tiny_model), prompt_of(12)
    decided = DecisionTokens(
        questions=(
            WrittenQuestion(
                layout="isolated-1",
                forms=tuple(
                    DecisionForm(ids=(5, n), paths=((1,), (2, 3), (4,)), options=(0, 0, 1), about=n)
                    for n in range(2)
                ),
            ),
            WrittenQuestion(
                layout="labels-1", forms=(DecisionForm(ids=(9,), paths=((1,), (2,)), options=(1, 0)),)
            ),
        ),
        prompt_ids=True,
    )
    scores = answered(local, state, decided).decisions
    assert scores is not None
    assert scores.state_ids == tuple(state)
    assert [(one.layout, len(one.forms)) for one in scores.questions] == [("isolated-1", 2), ("labels-1", 1)]
    forms = forms_of(scores)
    assert [(form.options, form.about, form.lengths, form.ids) for form in forms] == [
        ((0, 0, 1), 0, (1, 2, 1), (5, 0)),
        ((0, 0, 1), 1, (1, 2, 1), (5, 1)),
        ((1, 0), -1, (1, 1), (9,)),
    ]
    assert forms_of(answered(local, state, decide(([9], [[1], [2]]))).decisions)[0].ids == ()


def questions(count: int, seed: int = 0) -> list[Asked]:
    rng = random.Random(seed)
    return [(prompt_of(rng.randint(1, 24), n), [*many_paths(rng, rng.randint(2, 9))]) for n in range(count)]


def test_an_answer_has_the_same_bits_in_any_company(tiny_folder: Any) -> None:
    """Alone, among others, reversed, cold, cached, after an eviction, with few pages, beside decodes."""
    state, asked = prompt_of(70), questions(30)
    alone = LocalScheduler(tiny_folder, page_size=4)
    wanted = []
    for each in asked:
        wanted += logprobs(alone, state, each)
        alone.cache.flush()
    assert logprobs(alone, state, asked[3]) == wanted[3:4]
    assert logprobs(alone, state, asked[4]) == wanted[4:5], "cached"
    other = LocalScheduler(tiny_folder, page_size=4, chunk_tokens=48)
    assert logprobs(other, state, *asked) == wanted
    assert logprobs(other, state, *reversed(asked)) == wanted[::-1]
    few = LocalScheduler(tiny_folder, page_size=4, num_pages=48, chunk_tokens=19, max_running=5)
    decoding = [few.submit(prompt_of(20, 50 + n), max_tokens=40, ignore_eos=True) for n in range(3)]
    rid = few.submit(state, decide=decide(*asked), max_tokens=0)
    while not few.results[rid].ended:
        few.step(9)
        for request in [one for one in few.scheduler.requests.running if one.rid == rid]:
            few.scheduler.requests.retract(request)  # as where pages run out
    assert [list(form.logprobs) for form in forms_of(few.results[rid].decisions)] == wanted
    assert few.scheduler.counters.retractions > 0
    assert all(few.results[rid].finish is not None for rid in decoding)
    few.complete([prompt_of(200, n) for n in range(2)], max_tokens=2)
    assert few.scheduler.stats().evicted_pages > 0
    assert logprobs(few, state, *asked[::2]) == wanted[::2]
    assert idle(few)


@pytest.mark.parametrize("pages", [16, 20, 40])
def test_few_pages_change_nothing(tiny_model: Any, tiny_oracle: Any, pages: int) -> None:
    """Requests with questions, with choices and with answers compete for the pages."""
    local = LocalScheduler(tiny_model, page_size=4, num_pages=pages, chunk_tokens=16)
    rids = []
    for number in range(6):
        state, asked = prompt_of(20, number % 3), questions(4, number)
        asked = [(ids[:4], paths) for ids, paths in asked]
        rids.append((local.submit(state, decide=decide(*asked), max_tokens=0), state, asked))
    beside = [local.submit(prompt_of(12, 50 + n), max_tokens=14, ignore_eos=True) for n in range(3)]
    local.run()
    for rid, state, asked in rids:
        found = forms_of(local.results[rid].decisions)
        for (ids, paths), form in zip(asked, found, strict=True):
            assert list(form.logprobs) == near(exact(tiny_oracle, state + ids, paths))
    wanted = LocalScheduler(tiny_model).complete(
        [prompt_of(12, 50 + n) for n in range(3)], max_tokens=14, ignore_eos=True
    )
    assert [local.results[rid].ids for rid in beside] == [result.ids for result in wanted]
    assert local.cache.counts().in_use == 0


def test_the_deepest_tree_that_is_let_in_fits(tiny_model: Any) -> None:
    """Alone, each branch finds pages, however the tree forks."""
    rng = random.Random(3)
    for trial in range(12):
        state, asked = prompt_of(rng.randint(0, 20), trial), questions(2, 100 + trial)
        chain = [[1] * depth + [2] for depth in range(rng.randint(1, 30))]
        asked.append((prompt_of(3), chain))
        for pages in range(6, 40):
            local = LocalScheduler(tiny_model, page_size=4, num_pages=pages)
            rid = local.submit(state, decide=decide(*asked), max_tokens=0)
            if local.results[rid].error is None:
                break
            assert isinstance(local.results[rid].error, PromptTooLong)
        local.run()
        assert local.results[rid].error is None
        assert local.scheduler.counters.retractions == 0
        assert idle(local)


@pytest.mark.parametrize("steps", range(7))
def test_an_abort_gives_everything_back(tiny_model: Any, steps: int) -> None:
    local, state = LocalScheduler(tiny_model, chunk_tokens=16), prompt_of(40)
    asked: list[Asked] = [(prompt_of(20, n), [[n, 1, 2], [n, 3, 4], [9, 9]]) for n in range(4)]
    rid = local.submit(state, decide=decide(*asked), max_tokens=0)
    local.step(steps)
    assert not local.results[rid].ended
    local.scheduler.receive(Abort(rid=rid))
    local.step()
    result = local.results[rid]
    assert result.finish is not None
    assert (result.finish.reason, result.decisions) == ("abort", None)
    assert result.usage is not None
    assert result.usage.prompt_tokens == local.scheduler.counters.computed_tokens
    assert idle(local)


@pytest.mark.parametrize("part", ["pass", "logits"])
@pytest.mark.parametrize("passes", range(1, 3))
def test_a_failing_step_fails_the_request_once(tiny_model: Any, passes: int, part: Any) -> None:
    local, state = LocalScheduler(tiny_model), prompt_of(40)
    asked: list[Asked] = [(prompt_of(5, n), [[n, 1, 2], [n, 1, 4], [n, 3, 4]]) for n in range(4)]
    rid = local.submit(state, decide=decide(*asked), max_tokens=0)
    local.step(passes)
    with local.failing(part):
        local.step()
    assert isinstance(local.results[rid].error, EngineError)
    assert idle(local)
    fresh = logprobs(LocalScheduler(tiny_model), state, *asked)
    assert logprobs(local, state, *asked) == [pytest.approx(values) for values in fresh]


def test_a_retracted_request_goes_on_with_its_other_questions(tiny_model: Any) -> None:
    local, state = LocalScheduler(tiny_model, chunk_tokens=16), prompt_of(16)
    asked: list[Asked] = [(prompt_of(8, n), SALE) for n in range(8)]
    wanted = logprobs(LocalScheduler(tiny_model), state, *asked)
    rid = local.submit(state, decide=decide(*asked), max_tokens=0)
    for _ in range(4):
        local.step(3)
        local.scheduler.requests.retract(local.scheduler.requests.running[-1])
        assert local.cache.counts().leased > 0, "the state is kept"
    local.run()
    result = local.results[rid]
    assert [form.logprobs for form in forms_of(result.decisions)] == [pytest.approx(each) for each in wanted]
    assert result.usage is not None
    assert result.usage.retractions == 4
    assert local.scheduler.counters.computed_tokens < 2 * (16 + 8 * 12), "finished questions stay"
    assert idle(local)


def test_others_decode_beside_the_waves(tiny_model: Any) -> None:
    """Each step gives a decoding request its token, and its budget bounds the wave."""
    local = LocalScheduler(tiny_model, chunk_tokens=32)
    beside = local.submit(prompt_of(9), max_tokens=300, ignore_eos=True)
    local.step()
    rid = local.submit(prompt_of(64, 1), decide=decide(*questions(20)), max_tokens=0)
    widths: list[int] = []
    local.runner.before_pass = lambda batch: widths.append(len(batch.ids))
    while not local.results[rid].ended:
        tokens = len(local.results[beside].ids)
        local.step()
        assert len(local.results[beside].ids) == tokens + 1
    assert max(widths) <= 32 + 1
    local.run()


def test_a_higher_priority_goes_first(tiny_model: Any) -> None:
    local, state = LocalScheduler(tiny_model, chunk_tokens=16), prompt_of(20)
    low = local.submit(state, decide=decide(*questions(30)), max_tokens=0)
    local.step(4)
    high = local.submit(state, decide=decide(*questions(2, 1)), max_tokens=0, priority=1)
    while not local.results[high].ended:
        local.step()
        assert not local.results[low].ended
    local.run()
    assert forms_of(local.results[low].decisions)


def test_questions_behind_a_cached_state_count_as_work(tiny_model: Any) -> None:
    """A step lets in only as many as it can compute, and a shorter prompt goes before them."""
    local, state = LocalScheduler(tiny_model, chunk_tokens=16), prompt_of(40)
    answered(local, state, decide(([1], [[2], [3]])))
    for seed in range(3):
        local.submit(state, decide=decide(*questions(30, seed)), max_tokens=0)
    short = local.submit(prompt_of(50, 1), max_tokens=1, priority=-1)
    local.step()
    requests = local.scheduler.requests
    assert len(requests.running) == 1
    asked, prompt = requests.waiting[0], requests.waiting[-1]
    assert prompt.rid == short
    assert (matched := requests.pages.match(asked).length) == 40
    policy, now = HighestResponseRatioNext(requests.programs), asked.arrival + 1
    assert policy.key(prompt, 0, now) < policy.key(asked, matched, now)
    local.run()


class Counted(int):
    """A token that counts how often tokens are compared or looked up."""

    uses = 0

    def __hash__(self) -> int:
        Counted.uses += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Counted.uses += 1
        return super().__eq__(other)


def counted(paths: Paths) -> list[list[int]]:
    return [[Counted(token) for token in path] for path in paths]


def test_the_work_for_options_is_linear_in_their_tokens(tiny_model: Any) -> None:
    uses = []
    for count in (64, 256):
        asked = [(prompt_of(3), counted([[n, 1, 2] for n in range(count)]))]
        local, Counted.uses = LocalScheduler(tiny_model, chunk_tokens=512, num_pages=512), 0
        answered(local, prompt_of(9), decide(*asked))
        uses.append(Counted.uses)
    assert uses[0] > 64
    assert uses[1] < 5 * uses[0]


def test_a_step_does_the_work_for_its_own_questions(tiny_model: Any) -> None:
    """Other requests do not wait until the options of all questions are looked through."""
    local = LocalScheduler(tiny_model, chunk_tokens=32)
    rng, uses = random.Random(0), list[int]()
    asked = [(prompt_of(30, n), counted(many_paths(rng, 20))) for n in range(20)]
    decided, Counted.uses = decide(*asked), 0
    rid = local.submit(prompt_of(9), decide=decided, max_tokens=0)
    arrival, Counted.uses = Counted.uses, 0
    while not local.results[rid].ended:
        local.step()
        uses.append(Counted.uses)
        Counted.uses = 0
    assert sum(uses) > arrival / 2, "the trees are built in the steps"
    assert max(uses) < sum(uses) / 6


@pytest.mark.parametrize(
    ("state", "asked", "kind", "field"),
    [
        (100, [([1] * 20, [[1]]), ([1] * 20, [[1] * 9])], PromptTooLong, "decide.questions[1]"),
        (60, [([1] * 9, [[*range(n, n + 40)] for n in range(64)])], PromptTooLong, "decide.questions"),
        (4, [([1], [[1], [320]])], InvalidRequest, "decide.questions[0]"),
        (4, [([1], [])], InvalidRequest, "decide.questions[0]"),
        (0, [([], [[1], [2]])], InvalidRequest, "decide.questions[0]"),
        (4, [], InvalidRequest, "decide.questions"),
    ],
)
def test_what_does_not_fit_is_refused(
    tiny_model: Any, state: int, asked: list[Asked], kind: type[Exception], field: str
) -> None:
    local = LocalScheduler(tiny_model, context_length=128, num_pages=9)
    rid = local.submit(prompt_of(state), decide=decide(*asked), max_tokens=0)
    error = local.results[rid].error
    assert type(error) is kind
    assert error.field == field
    assert idle(local)


def test_a_step_waits_for_the_device_once(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ramify.runtime.scheduler import path_scores

    waits: list[str] = []

    def noting(name: str) -> Any:
        plain = getattr(torch.Tensor, name)

        def noted(*args: Any) -> Any:
            waits.append(name)
            return plain(*args)

        return noted

    record = path_scores.StepTerms.record

    def watched(*args: Any) -> None:
        with monkeypatch.context() as patch:
            for name in ("tolist", "item", "cpu", "nonzero"):
                patch.setattr(torch.Tensor, name, noting(name))
            record(*args)

    monkeypatch.setattr(path_scores.StepTerms, "record", watched)
    local = LocalScheduler(tiny_model, chunk_tokens=512)
    answered(local, prompt_of(10), decide(*(([n], SALE) for n in range(100))))
    steps = local.scheduler.stats().steps
    assert steps > 2
    assert waits == ["cpu"] * (steps - 1)
