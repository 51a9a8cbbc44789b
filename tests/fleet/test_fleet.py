"""A fleet of engine cores without processes: who gets each message, and its fate when an engine core dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ramify.engine_messages import (
    INTERNAL,
    Abort,
    AwaitTools,
    EndProgram,
    Failed,
    GetStats,
    GetTree,
    LoadLora,
    Reply,
    StepText,
    Texts,
    TokenIds,
    Tokenize,
    TreeChange,
    UnloadLora,
)
from ramify.errors import EngineError, InvalidRequest, NotFound, UnsupportedField
from ramify.messages import Generate, TextChunk
from ramify.runtime.config import EngineConfig
from ramify.runtime.cores import usable_cores
from ramify.runtime.fleet.placement import NoReplica, Placement, Work
from ramify.runtime.fleet.replica import EngineEvents
from ramify.runtime.processes import shares
from ramify.sampling_params import SamplingParams
from tests.fleet.fakes import PREFIX, FakeEngine, Fleet, asked, page_ends


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


# --- requests -----------------------------------------------------------------------------------


def test_siblings_go_to_one_replica_and_other_prefixes_to_the_other(fleet: Fleet) -> None:
    for index in range(8):
        fleet.send(asked(f"r{index}", index, program="p"))
    homes = {fleet.home(f"r{index}") for index in range(8)}
    assert len(homes) == 1
    fleet.send(Generate(rid="other", prompt=(PREFIX[::-1],)))
    assert {fleet.home("other")} != homes


def test_scopes_are_apart(fleet: Fleet) -> None:
    fleet.send(asked("a"))
    fleet.send(asked("b", scope="mine"))
    assert fleet.home("a") != fleet.home("b")


def test_a_tree_that_has_the_prefix_draws_it(fleet: Fleet) -> None:
    fleet.engines[1].receive(TreeChange(epoch=1, number=1, added=page_ends(PREFIX)))
    fleet.send(asked("a"))
    assert fleet.home("a") == 1
    assert not fleet.engines[1].take(GetTree)
    fleet.engines[1].receive(TreeChange(epoch=1, number=3))
    assert fleet.engines[1].take(GetTree), "number 2 was lost"


def test_the_first_replica_tells_the_size_of_pages() -> None:
    placement = Placement()
    fleet = Fleet(page_size=64, fleet_options={"placement": placement})
    fleet.engines[1].receive(TreeChange(epoch=1, number=1, added=page_ends(PREFIX, 64)))
    fleet.send(asked("a", sampling=SamplingParams(max_tokens=0)))
    assert fleet.home("a") == 1
    assert placement.work_of("1") == 1000 - 15 * 64, "the tree holds 15 whole pages"
    made: list[FakeEngine] = []
    with pytest.raises(EngineError, match="far has pages of 16 tokens, and the others of 64"):
        asyncio.run(fleet.fleet.add("far", make(made)))
    assert made[0].closed


def test_what_trees_hold_is_passed_on_in_order_and_without_gaps(fleet: Fleet) -> None:
    first = TreeChange(epoch=1, number=1, added=(7,))
    late = TreeChange(epoch=1, number=4, added=(9,))
    whole = TreeChange(epoch=1, number=4, added=(7, 8, 9), whole=True)
    behind = TreeChange(epoch=1, number=5, removed=(7,))
    for change in (first, TreeChange(epoch=1, number=3, added=(8,)), late, whole, behind):
        fleet.engines[1].receive(change)
    assert fleet.trees == [("1", first), ("1", whole), ("1", behind)]
    assert len(fleet.engines[1].take(GetTree)) == 1
    fleet.kill(1)
    assert fleet.trees[3:] == [("1", None)]


def test_texts_are_tokenised_before_they_are_placed(fleet: Fleet) -> None:
    fleet.send(Generate(rid="a", prompt=("text",)))
    (question,) = [one for engine in fleet.engines for one in engine.take(Tokenize)]
    fleet.send(Abort(rid="a"))
    fleet.engines[0].receive(Texts(rid=question.rid, prompts=(TokenIds(ids=PREFIX, tokens=()),)))
    assert fleet.home("a") == 0
    assert [type(one) for one in fleet.engines[0].sent] == [Generate, Abort], "in this order"
    fleet.send(asked("b"))
    assert fleet.home("b") == 0, "it shares the prefix"


def test_a_prompt_that_cannot_be_tokenised_is_refused_by_its_replica(fleet: Fleet) -> None:
    fleet.send(Generate(rid="a", prompt=("text",)))
    (question,) = fleet.engines[0].take(Tokenize)
    error = InvalidRequest("no").to_info()
    fleet.engines[0].receive(Failed(rid=question.rid, error=error))
    home = fleet.engines[fleet.home("a")]
    home.receive(Failed(rid="a", error=error))
    assert fleet.got == [Failed(rid="a", error=error)]
    assert not fleet.requests()


def test_a_clients_id_is_none_of_a_question(fleet: Fleet) -> None:
    fleet.send(asked("place-a"))
    fleet.send(asked("prefixes"))
    fleet.send(Generate(rid="a", prompt=("text",)))
    (question,) = [one for engine in fleet.engines for one in engine.take(Tokenize)]
    error = InvalidRequest("no").to_info()
    fleet.engines[0].receive(Failed(rid=question.rid, error=error))
    assert not fleet.got
    assert fleet.home("a") in (0, 1), "it is placed, and its replica refuses it"
    assert question.rid.startswith(INTERNAL)


def test_ids_that_no_prompt_has_are_refused_by_the_replica(fleet: Fleet) -> None:
    fleet.send(Generate(rid="a", prompt=((10**12,),)))
    fleet.home("a")


def test_requests_under_a_limit_of_tokens_stay_on_one_replica(fleet: Fleet) -> None:
    """Only a scheduler that has all requests of the limit can sum their tokens."""
    long = tuple(range(5000, 9000))
    fleet.send(Generate(rid="first", prompt=((1,),), hint=asked("x", program="p", limit=10**6).hint))
    home = fleet.home("first")
    for index in range(4):
        hint = asked("x", program=f"q{index}", limit=10**6).hint
        fleet.send(Generate(rid=f"r{index}", prompt=((index, *long),), hint=hint))
        assert fleet.home(f"r{index}") == home
    fleet.send(Generate(rid="free", prompt=((9, *long),), hint=asked("x", program="p").hint))
    assert fleet.home("free") != home, "it would not have stayed there without the limit"


def test_what_is_done_counts_no_more(fleet: Fleet) -> None:
    fleet.send(asked("a"))
    home = fleet.home("a")
    chunk = fleet.engines[home].end("a", 1, text="x")
    assert fleet.got[-1].chunks == (chunk,)
    assert not fleet.requests()
    fleet.send(Abort(rid="a"))
    assert not fleet.engines[home].take(Abort)


def test_programs_are_told_of_everywhere(fleet: Fleet) -> None:
    fleet.send(AwaitTools(program="p", branch="b", tools=("t",)))
    fleet.send(EndProgram(program="p"))
    assert [len(engine.take(AwaitTools, EndProgram)) for engine in fleet.engines] == [2, 2]


# --- deaths -------------------------------------------------------------------------------------


def test_requests_of_the_dead_go_to_the_living(fleet: Fleet) -> None:
    fleet.send(asked("a"))
    home = fleet.home("a")
    fleet.kill(home)
    assert fleet.lost == [["a"]]
    assert not fleet.fleet.restarting
    fleet.engines[home].sent.clear()
    fleet.send(asked("a"))  # as the frontend does
    assert fleet.home("a") == 1 - home


def test_with_nobody_left_requests_wait(fleet: Fleet) -> None:
    text = Generate(rid="text", prompt=("text",))
    fleet.send(text)
    fleet.kill(0)
    assert fleet.lost == [["text"]], "its prompt may be what kills tokenizers"
    fleet.send(text)
    assert len(fleet.engines[1].take(Tokenize)) == 1, "the other tokenizer is asked"
    fleet.kill(1)
    assert fleet.lost == [["text"], ["text"]]
    fleet.send(text)
    assert fleet.fleet.restarting
    fleet.send(asked("a"))
    fleet.send(Abort(rid="a"))
    with pytest.raises(UnicodeEncodeError):
        fleet.send(Generate(rid="b", prompt=("\ud800",)))
    fleet.send(GetStats(rid="s"))
    fleet.engines[1].sent.clear()
    fleet.engines[1].came_back()
    assert fleet.restarts == 2 + 1, "two at the start"
    assert {type(one) for one in fleet.engines[1].sent} == {Tokenize, Generate, Abort, GetStats}
    (question,) = fleet.engines[1].take(Tokenize)
    fleet.engines[1].receive(Texts(rid=question.rid, prompts=(TokenIds(ids=(1,), tokens=()),)))
    assert fleet.home("text") == 1


def test_the_last_replica_that_gives_up_ends_the_engine(fleet: Fleet) -> None:
    for index in (1, 0):
        assert not fleet.gave_up
        fleet.kill(index)
        fleet.engines[index].gave_up(EngineError(f"of {index}"))
    assert [str(error) for error in fleet.gave_up] == ["of 0"]


# --- replicas come and go -------------------------------------------------------------------------


def make(made: list[FakeEngine]) -> Callable[[EngineEvents], Any]:
    def engine(events: EngineEvents) -> FakeEngine:
        made.append(FakeEngine(EngineConfig(), None, name="far", events=events))
        return made[-1]

    return engine


def test_an_engine_of_any_kind_joins_and_vanishes_by_its_name(fleet: Fleet) -> None:
    made: list[FakeEngine] = []
    for index in (0, 1):
        fleet.kill(index)
    fleet.send(asked("a"))
    asyncio.run(fleet.fleet.add("far", make(made)))
    (engine,) = made
    assert [one.rid for one in engine.take(Generate)] == ["a"], "it had waited for a replica"
    assert fleet.fleet.replicas["far"].state == "up"
    with pytest.raises(InvalidRequest, match="There is a replica 'far'"):
        asyncio.run(fleet.fleet.add("far", make(made)))

    asyncio.run(fleet.fleet.remove("far"))
    assert fleet.lost[-1] == ["a"]
    assert engine.closed
    assert "far" not in fleet.fleet.replicas
    chunk = TextChunk(rid="a", text="x", ids=(1,))
    engine.receive(StepText(chunks=(chunk,)))
    assert not fleet.got, "it goes on elsewhere, and would be said twice"


def drained(fleet: Fleet, name: str, limit_s: float, *during: Callable[[], None], last: bool = False) -> None:
    """Drain a replica; `during` are called while it drains."""

    async def drain() -> None:
        task = asyncio.ensure_future(fleet.fleet.drain(name, limit_s, last=last))
        for one in during:
            await asyncio.sleep(0)
            one()
        await task

    asyncio.run(drain())


def test_a_draining_replica_ends_what_it_has_and_gets_nothing(fleet: Fleet) -> None:
    fleet.send(asked("a", program="p"))
    home = fleet.home("a")
    drained(
        fleet,
        str(home),
        1e6,
        lambda: fleet.send(asked("b", program="p")),
        lambda: fleet.engines[home].end("a", 1, text="x"),
    )
    assert fleet.home("b") == 1 - home
    assert not fleet.lost[0]
    assert fleet.got[-1].chunks[0].text == "x"
    assert list(fleet.fleet.replicas) == [str(1 - home)]
    assert fleet.engines[home].closed


def test_past_its_limit_a_drain_moves_requests(fleet: Fleet) -> None:
    fleet.send(asked("a"))
    home = fleet.home("a")
    drained(fleet, str(home), 0.0)
    assert fleet.lost == [["a"]]
    assert fleet.errors == [None], "nothing has died"
    fleet.engines[home].sent.clear()
    fleet.send(asked("a"))
    assert fleet.home("a") == 1 - home


def test_a_replica_that_dies_while_it_drains_is_not_replaced(fleet: Fleet) -> None:
    fleet.send(asked("a"))
    home = fleet.home("a")
    drained(fleet, str(home), 1e6, lambda: fleet.kill(home))
    assert list(fleet.fleet.replicas) == [str(1 - home)]
    assert fleet.engines[home].closed


def test_the_last_replica_is_not_drained(fleet: Fleet) -> None:
    with pytest.raises(NotFound, match="no replica '7'; there are 0, 1"):
        drained(fleet, "7", 0.0)
    drained(fleet, "0", 0.0)
    with pytest.raises(InvalidRequest, match="the last one"):
        drained(fleet, "1", 0.0)
    fleet.send(asked("a"))
    assert fleet.home("a") == 1

    fleet.fleet.replicas["1"].engine.sent.clear()
    asyncio.run(fleet.fleet.add_one())
    both: list[Exception] = []

    async def drain_both() -> None:
        found = await asyncio.gather(*(fleet.fleet.drain(one, 0.0) for one in "01"), return_exceptions=True)
        both.extend(one for one in found if isinstance(one, Exception))

    asyncio.run(drain_both())
    assert [type(one) for one in both] == [InvalidRequest], "one of them stays"


def test_a_restarted_replica_has_its_name_and_the_only_one_keeps_requests(fleet: Fleet) -> None:
    drained(fleet, "0", 0.0)
    fleet.send(asked("a"))
    before = fleet.fleet.replicas["1"].engine

    async def restart() -> None:
        task = asyncio.ensure_future(fleet.fleet.restart("1", 0.0))
        while not fleet.lost[-1]:
            await asyncio.sleep(0)
        fleet.send(asked("a"))  # as the frontend does
        await task

    asyncio.run(restart())
    engine: Any = fleet.fleet.replicas["1"].engine
    assert engine is not before
    assert [one.rid for one in engine.take(Generate)] == ["a"]
    assert asyncio.run(fleet.fleet.add_one()) == "0", "the lowest number that is free"


def test_one_replica_is_restarted_and_gets_no_second_one() -> None:
    fleet = Fleet(replicas=1)
    fleet.send(Generate(rid="a", prompt=("text",)))
    assert fleet.home("a") == 0, "its prompt is not tokenised first: there is nothing to choose"

    async def restart() -> None:
        task = asyncio.ensure_future(fleet.fleet.operator.restart("0", 1e6))
        await asyncio.sleep(0)
        fleet.send(Generate(rid="b", prompt=((1, 2),)))
        assert not fleet.homes("b"), "it waits"
        fleet.engines[0].end("a")
        await task

    asyncio.run(restart())
    assert fleet.home("b") == 1, "in the new engine core"
    assert fleet.lost == [[]]
    with pytest.raises(UnsupportedField, match="has the whole machine"):
        asyncio.run(fleet.fleet.operator.add_one())
    with pytest.raises(InvalidRequest, match="the last one"):
        drained(fleet, "0", 0.0)


def test_one_replica_keeps_its_longest_prompt_while_it_restarts() -> None:
    fleet = Fleet(replicas=1)
    assert fleet.fleet.max_prompt_tokens == 1000
    asyncio.run(fleet.fleet.remove("0"))
    assert fleet.fleet.max_prompt_tokens == 1000


def test_one_replica_runs_a_suspect_before_those_that_wait() -> None:
    fleet = Fleet(replicas=1)
    fleet.kill(0)
    fleet.send(Generate(rid="a", prompt=("text",)))
    fleet.fleet.send_alone(Generate(rid="suspect", prompt=("kills",)))
    fleet.engines[0].came_back()
    fleet.send(Generate(rid="b", prompt=((3,),)))
    assert [one.rid for one in fleet.engines[0].sent] == ["suspect"]
    with pytest.raises(UnicodeEncodeError):
        fleet.send(Generate(rid="bad", prompt=("\ud800",)))
    fleet.fleet.end_alone()
    assert [one.rid for one in fleet.engines[0].take(Generate)] == ["suspect", "a", "b"]
    fleet.send(Generate(rid="c", prompt=("text",)))
    assert [one.rid for one in fleet.engines[0].take(Generate)] == ["c"], "nothing is held back any more"


def test_with_no_core_left_no_replica_is_added() -> None:
    count = max(len(usable_cores()), 2)
    fleet = Fleet(replicas=count)
    says = f"There are {count} replicas, and this process can use"
    with pytest.raises(UnsupportedField, match=says) as raised:
        asyncio.run(fleet.fleet.add_one())
    assert raised.value.remedy is not None
    assert "Drain" in raised.value.remedy
    assert len(fleet.fleet.replicas) == count


# --- questions ----------------------------------------------------------------------------------


def test_an_adapter_is_loaded_everywhere_or_nowhere(fleet: Fleet) -> None:
    load = LoadLora(rid="1", name="x", path="/x")
    fleet.send(load)
    fleet.engines[0].receive(Reply(rid="1", lora="v1"))
    assert not fleet.got
    fleet.engines[1].receive(Reply(rid="1", lora="v1"))
    assert fleet.got == [Reply(rid="1", lora="v1")]
    assert not fleet.timers.waiting
    fleet.send(asked("plain"))
    fleet.send(asked("adapted", lora="x"))
    assert fleet.home("plain") != fleet.home("adapted"), "they share no pages"

    fleet.kill(1)
    fleet.engines[1].sent.clear()
    fleet.engines[1].came_back()
    again = msgspec.structs.replace(load, rid="2")
    fleet.send(again)
    assert fleet.engines[0].take(LoadLora) == [load]
    assert fleet.engines[1].take(LoadLora) == [again], "only who lacks it loads it"
    fleet.engines[1].receive(Reply(rid="2", lora="v2"))
    assert "have changed" in fleet.got[-1].error.message
    assert [len(engine.take(UnloadLora)) for engine in fleet.engines] == [1, 1]


def test_an_adapter_that_one_replica_does_not_load_in_time_is_loaded_nowhere(fleet: Fleet) -> None:
    fleet.send(LoadLora(rid="1", name="x", path="/x"))
    fleet.engines[0].receive(Reply(rid="1", lora="v1"))
    assert fleet.timers.seconds == [120.0]
    fleet.timers.waiting[0]()
    (answer,) = fleet.got
    assert "not answered within 120 s: 1." in answer.error.message
    assert [len(engine.take(UnloadLora)) for engine in fleet.engines] == [1, 1]
    fleet.engines[1].receive(Reply(rid="1", lora="v1"))
    assert fleet.got == [answer]
    assert not fleet.fleet.replicas["1"].loras
    for index in (0, 1):
        fleet.kill(index)
    fleet.send(UnloadLora(rid="2", name="x"))
    fleet.timers.waiting[-1]()
    assert "No replica" in fleet.got[-1].error.message, "with none up it ends as well"


def test_a_death_does_not_keep_an_answer_back(fleet: Fleet) -> None:
    fleet.send(LoadLora(rid="1", name="x", path="/x"))
    fleet.engines[0].receive(Reply(rid="1", lora="v1"))
    fleet.kill(1)
    assert fleet.got == [Reply(rid="1", lora="v1")]


# --- shares -------------------------------------------------------------------------------------


def test_cores_are_divided(caplog: pytest.LogCaptureFixture) -> None:
    assert shares.split_cores([4, 5, 6, 7, 8], 2, "replicas") == [(4, 5), (6, 7, 8)]
    assert not caplog.records
    assert shares.split_cores([4, 5], 3, "replicas") == [(4,), (5,), (4,)]
    assert "3 replicas share 2 cores" in caplog.text


def test_each_replica_has_a_gpu_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_gpus", lambda config: ["GPU-a", "GPU-b"])
    two = shares.shares(EngineConfig(replicas=2))
    assert [share.env()["CUDA_VISIBLE_DEVICES"] for share in two] == ["GPU-a", "GPU-b"]
    with pytest.raises(UnsupportedField, match="replicas is 3; this process can use 2 GPUs"):
        shares.shares(EngineConfig(replicas=3))
    monkeypatch.setattr(shares, "_gpus", lambda config: [])
    with pytest.raises(UnsupportedField, match="0 GPUs"):
        shares.shares(EngineConfig(replicas=2, device="cuda"))


def test_only_one_replica_can_be_asked_for() -> None:
    placement = Placement(16)
    placement.join("a")
    with pytest.raises(NoReplica):
        placement.place(Work("r", (), 1, 1.0), 0.0, "b")
