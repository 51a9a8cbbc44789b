"""LoRA adapters in the scheduler: several in one batch, each equal to a model with its merged weights."""

from __future__ import annotations

import asyncio
import gc
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from ramify.engine_messages import ChoiceTokens, LoadLora, Reply, UnloadLora
from ramify.errors import EngineError, InvalidRequest, NotFound, RamifyError, WorkerDied, is_transient
from ramify.messages import Continuation
from ramify.runtime.frontend.loras import Answer, Loras
from tests.model.adapters import merge, write_adapter
from tests.runtime.local import LocalScheduler
from tests.runtime.tiny import write_model

TOKENS = 12
PROMPTS = [list(range(40, 75)), [*range(40, 60), 7, 8, 9], [90, 91, 92, 93]]


@dataclass
class Tuned:
    """A model and its three adapters, with the greedy answers of each merged checkpoint."""

    base: Path
    adapters: dict[str, Path]
    answers: dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    root = tmp_path_factory.mktemp("lora")
    base = root / "base"
    write_model(base)
    adapters = {
        "all": write_adapter(root / "all", base, seed=1),
        "attention": write_adapter(
            root / "attention", base, seed=2, targets=("q_proj", "v_proj"), rank=9, alpha=6, use_rslora=True
        ),
        "mixed": write_adapter(
            root / "mixed",
            base,
            seed=3,
            targets=("k_proj", "down_proj", "up_proj"),
            layers=[1],
            rank_pattern={"up_proj": 3},
            alpha_pattern={"k_proj": 16},
        ),
    }
    scales = {
        "all": 2.0,
        "attention": 6 / math.sqrt(9),
        "mixed": {"k_proj": 16 / 4, "down_proj": 8 / 4, "up_proj": 8 / 3},
    }
    answers = {}
    for name in ("", *adapters):
        folder = merge(root / f"{name}-merged", base, adapters[name], scales[name]) if name else base
        local = LocalScheduler(folder)
        answers[name] = [result.ids for result in local.complete(PROMPTS, max_tokens=TOKENS)]
    assert len({str(found) for found in answers.values()}) == 4
    return Tuned(base, adapters, answers)


def started(tuned: Tuned, **options: object) -> LocalScheduler:
    local = LocalScheduler(tuned.base, **options)  # type: ignore[arg-type]
    for name, folder in tuned.adapters.items():
        local.scheduler.receive(LoadLora(rid=name, name=name, path=str(folder)))
    assert all(reply.lora for reply in local.replies)
    return local


def together(local: LocalScheduler, tuned: Tuned) -> None:
    rids = {
        (name, place): local.submit(prompt, max_tokens=TOKENS, lora=name)
        for place, prompt in enumerate(PROMPTS)
        for name in tuned.answers
    }
    local.run()
    for (name, place), rid in rids.items():
        assert local.results[rid].ids == tuned.answers[name][place], (name, place)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"deterministic": False},
        {"chunk_tokens": 7, "page_size": 4, "num_pages": 23, "max_running": 4},
        {"attention_backend": "torch"},
    ],
)
def test_a_batch_with_several_adapters_equals_merged_checkpoints(
    tuned: Tuned, options: dict[str, object]
) -> None:
    local = started(tuned, **options)
    together(local, tuned)
    assert bool(local.scheduler.counters.retractions) == ("num_pages" in options)
    assert local.runner.stacked == options.keys().isdisjoint({"deterministic", "attention_backend"})
    together(local, tuned)  # again, with hits in the tree


def test_kv_is_shared_by_requests_of_one_adapter_alone(tuned: Tuned) -> None:
    local = started(tuned)
    for name in ("", "all", "attention"):
        rid = local.submit(PROMPTS[0], max_tokens=2, lora=name)
        local.run()
        assert local.results[rid].usage.cached_tokens == 0
    rid = local.submit(PROMPTS[0], max_tokens=2, lora="all")
    local.run()
    assert local.results[rid].usage.cached_tokens == len(PROMPTS[0]) - 1
    rid = local.submit(PROMPTS[0], max_tokens=2, lora="all", scope="other")
    local.run()
    assert local.results[rid].usage.cached_tokens == 0


def test_another_adapter_under_the_same_name_finds_no_old_kv(tuned: Tuned) -> None:
    local = started(tuned)
    local.submit(PROMPTS[0], max_tokens=2, lora="all")
    local.run()
    for path, hit in ((tuned.adapters["attention"], False), (tuned.adapters["all"], True)):
        local.scheduler.receive(UnloadLora(rid="u", name="all"))
        local.scheduler.receive(LoadLora(rid="l", name="all", path=str(path)))
        rid = local.submit(PROMPTS[0], max_tokens=TOKENS, lora="all")
        local.run()
        assert bool(local.results[rid].usage.cached_tokens) == hit
        assert local.results[rid].ids == tuned.answers[path.name][0]


def test_requests_outlive_the_unloading_of_their_adapter(tuned: Tuned) -> None:
    local = started(tuned)
    rid = local.submit(PROMPTS[0], max_tokens=TOKENS, lora="all")
    local.step(4)
    local.scheduler.receive(UnloadLora(rid="u", name="all"))
    refused = local.submit(PROMPTS[1], max_tokens=2, lora="all")
    # The slot is not given to another adapter while the request runs.
    local.scheduler.receive(LoadLora(rid="l", name="other", path=str(tuned.adapters["attention"])))
    local.run()
    assert local.results[rid].ids == tuned.answers["all"][0]
    error = local.results[refused].error
    assert isinstance(error, NotFound)
    assert error.field == "lora"
    assert "attention, mixed" in str(error)
    del local.results[rid]
    gc.collect()
    assert local.runner.adapters.slots == {1, 2, 3}


def test_choices_are_scored_with_the_adapter(tuned: Tuned) -> None:
    scores = {}
    for name in ("", "all"):
        local = started(tuned)
        choices = [ChoiceTokens(shared=len(PROMPTS[0]), ids=ids) for ids in ((5, 6), (5, 9, 9), (30,))]
        rid = local.submit(PROMPTS[0], choices=choices, max_tokens=0, lora=name)
        local.run()
        scores[name] = [score.tokens.logprobs for score in local.results[rid].choices]
    folder = tuned.adapters["all"].parent / "all-merged"
    local = LocalScheduler(folder)
    rid = local.submit(PROMPTS[0], choices=choices, max_tokens=0)
    local.run()
    for found, wanted in zip(scores["all"], local.results[rid].choices, strict=True):
        assert found == pytest.approx(wanted.tokens.logprobs, abs=1e-3)
    assert scores["all"] != scores[""]


def test_unknown_and_repeated_names_are_refused(tuned: Tuned) -> None:
    adapters = started(tuned).runner.adapters
    with pytest.raises(InvalidRequest, match="loaded already"):
        adapters.load("all", str(tuned.adapters["all"]))
    with pytest.raises(NotFound, match="all, attention, mixed"):
        adapters.unload("other")


def test_after_a_death_no_request_goes_on_with_other_weights(tuned: Tuned) -> None:
    """The next engine core has other files under the adapter's name, so the continued request fails."""
    local = started(tuned)
    revisions = {name: reply.lora for name, reply in zip(tuned.adapters, local.replies, strict=True)}
    ids = tuple(tuned.answers["all"][0])
    continued = {"lora": "all", "continues": Continuation(ids=ids[:5]), "max_tokens": TOKENS}
    same = local.submit(PROMPTS[0], lora_revision=revisions["all"], **continued)
    other = local.submit(PROMPTS[0], lora_revision=revisions["mixed"], **continued)
    local.run()
    assert tuple(local.results[same].ids) == ids
    error = local.results[other].error
    assert isinstance(error, WorkerDied)
    assert "LoRA adapter 'all' has changed" in str(error)
    assert is_transient(error)


class FakeEngine:
    """A fake engine core that answers the messages of `Loras` when a test calls `answer`."""

    def __init__(self) -> None:
        self.asked: list[tuple[LoadLora | UnloadLora, Answer]] = []
        self.loras = Loras(self._ask, lambda: "q")

    def _ask(self, message: LoadLora | UnloadLora) -> Answer:
        answer: Answer = asyncio.get_running_loop().create_future()
        self.asked.append((message, answer))
        return answer

    async def answer(self, result: str | RamifyError) -> None:
        """Answer the oldest message."""
        _, answer = self.asked.pop(0)
        if not answer.done():
            if isinstance(result, str):
                answer.set_result(Reply(rid="q", lora=result))
            else:
                answer.set_exception(result)
        await asyncio.sleep(0)


def test_an_adapter_is_listed_whose_loading_was_cancelled() -> None:
    async def main() -> None:
        engine = FakeEngine()
        loading = asyncio.create_task(engine.loras.load("x", "folder"))
        await asyncio.sleep(0)
        loading.cancel()
        await asyncio.wait([loading])
        await engine.answer("1")
        assert loading.cancelled()
        assert engine.loras.revision("x") == "1"

    asyncio.run(main())


def test_names_of_the_model_are_no_names_of_adapters() -> None:
    loras = Loras(lambda message: pytest.fail("asked"), lambda: "q", lambda: ("served", "default"))
    for name in ("served", "default"):
        with pytest.raises(InvalidRequest, match=f"cannot have the name '{name}'") as caught:
            asyncio.run(loras.load(name, "folder"))
        assert caught.value.field == "name"


def test_an_adapter_of_another_model_is_told(
    tuned: Tuned, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_adapter(tmp_path / "a", tuned.base, seed=1, base_model_name_or_path="x/Other-7B")
    local = LocalScheduler(tuned.base)
    local.scheduler.receive(LoadLora(rid="l", name="a", path=str(folder)))
    assert local.replies[-1].lora
    assert caplog.messages == ["the LoRA adapter a is of x/Other-7B, and the model is SmolLM2-135M-Instruct"]


def test_what_a_new_engine_cannot_load_is_gone_unless_that_engine_died(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        engine = FakeEngine()
        names = ("kept", "changed", "broken", "invalid")
        for name in names:
            loading = asyncio.create_task(engine.loras.load(name, "folder"))
            await asyncio.sleep(0)
            await engine.answer("1")
            await loading
        engine.loras.restore()
        assert [message.name for message, _ in engine.asked] == list(names)
        for result in (WorkerDied("It died."), "2", EngineError("A bug."), InvalidRequest("No such folder.")):
            await engine.answer(result)
        assert {name: lora.revision for name, lora in engine.loras.loaded.items()} == {
            "kept": "1",
            "changed": "2",
        }

    asyncio.run(main())
    told = [record.getMessage() for record in caplog.records]
    assert [message.partition(":")[0] for message in told] == [
        "the files of the LoRA adapter changed have changed",
        "the LoRA adapter broken is gone",
        "the LoRA adapter invalid is gone",
    ]
