"""A recorded run replays offline, exactly; an unrecorded request is refused with its difference."""

from __future__ import annotations

import asyncio
import re

import pytest

import ramify as rm
from ramify.errors import InvalidRequest, Overloaded
from ramify.lang.backends.replay import NotRecorded, RecordingBackend, ReplayBackend
from ramify.messages import Generate
from ramify.sampling_params import SamplingParams
from tests.lang.backends import Breaking, Holding


@rm.function
def essay(s, topic, tone="kind"):
    s += rm.system(f"You are {tone}.") + rm.user(f"Write about {topic}.")
    s += rm.assistant(rm.gen("draft", max_tokens=20, logprobs=1))
    views = s.fork(3)
    views += rm.user("Judge it.") + rm.assistant(rm.gen("view"))
    views.join()
    s += rm.user("Grade?") + rm.assistant(rm.select("grade", ["A", "B"]))
    s += rm.user("Again.") + rm.assistant(rm.gen("more", n=2))


def backend():
    return rm.ScriptedBackend(
        {"draft": "Trees are tall.", "view": ["one", "two", "three"], "grade": "B", "more": ["x", "y"]}
    )


def outcome(state):
    """All results of a run but request ids and times."""
    names = ("draft", "view", "grade", "more")
    metas = [without_ids(state.get_meta_info(name)) for name in names]
    calls = [(call.kind, call.name, call.text, call.own_usage) for call in state.trace.walk()]
    return [state[name] for name in names], state.text(), metas, calls


def without_ids(meta):
    if isinstance(meta, dict):
        return {name: value for name, value in meta.items() if name != "id"}
    return [without_ids(one) for one in meta]


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "run.jsonl"
    state = essay.run("trees", backend=RecordingBackend(backend(), path))
    return path, state


def test_a_replayed_run_is_the_recorded_one(recorded):
    path, state = recorded
    replay = ReplayBackend(path)
    again = essay.run("trees", backend=replay)
    assert outcome(again) == outcome(state)
    assert replay.unused == []


def test_each_branch_gets_its_own_answer_whatever_the_order(tmp_path):
    @rm.function
    async def views(s, order):
        s += "Q"
        forks = s.fork(3)
        for index in order:
            forks[index] += rm.gen("x")
            await forks[index].wait()
        s["all"] = [fork["x"] for fork in forks]

    path = tmp_path / "run.jsonl"
    recording = RecordingBackend(rm.ScriptedBackend({"x": ["a", "b", "c"]}), path)
    assert asyncio.run(_run(views, [0, 1, 2], recording))["all"] == ["a", "b", "c"]
    assert asyncio.run(_run(views, [2, 0, 1], ReplayBackend(path)))["all"] == ["a", "b", "c"]


async def _run(program, *arguments):
    return await program.run(*arguments[:-1], backend=arguments[-1])


def test_chunks_come_as_they_came(recorded):
    path, _ = recorded
    state = essay.run("trees", backend=ReplayBackend(path), stream=True)
    assert list(state.text_iter("draft")) == ["Trees", " are", " tall", "."]


def test_another_prompt_is_refused_with_the_place(recorded):
    path, _ = recorded
    with pytest.raises(NotRecorded) as raised:
        essay.run("bees", backend=ReplayBackend(path))
    message = str(raised.value)
    assert re.match(r"gen 'draft' at \S+test_replay\.py:\d+ failed: ", message)
    assert f"essay/gen draft is not in {path}. The most similar is request 0 (essay" in message
    assert r"user\nWrite about ': it" in message
    assert "it continues with 'bees." in message
    assert "recorded was 'trees." in message
    assert message.endswith("Record the run again.")


def test_another_option_is_refused_by_name(recorded):
    path, _ = recorded
    with pytest.raises(NotRecorded, match=r"draft\): temperature is 0\.5, was 1\.0\."):
        essay.run("trees", temperature=0.5, backend=ReplayBackend(path))


def test_a_request_too_many_is_refused(recorded):
    path, _ = recorded
    replay = ReplayBackend(path)
    essay.run("trees", backend=replay)
    with pytest.raises(NotRecorded, match=r"repeats a request more often than .* has it: 1 times"):
        essay.run("trees", backend=replay)


def test_what_was_not_asked_for_is_known(recorded):
    path, _ = recorded
    replay = ReplayBackend(path)
    with pytest.raises(NotRecorded):
        essay.run("trees", tone="cruel", backend=replay)
    assert len(replay.unused) == len(path.read_text().splitlines()) - 1


def test_an_error_is_replayed(tmp_path):
    @rm.function
    def program(s):
        s += "Q" + rm.gen("x")

    path = tmp_path / "run.jsonl"
    failing = Breaking(["one two three"], Overloaded("The queue is full.", retry_after=3), after=2)
    program.run(backend=RecordingBackend(failing, path))
    state = program.run(backend=ReplayBackend(path))
    cause = state.error().__cause__
    assert (type(cause), str(cause), cause.retry_after) == (Overloaded, "The queue is full.", 3)
    assert state.trace.children[0].text == "one two"


async def test_a_run_that_was_left_replays_as_far_as_it_went(tmp_path):
    path = tmp_path / "run.jsonl"
    holding = Holding(["one two three"])
    recording = RecordingBackend(holding, path)
    request = Generate(rid="r", prompt=("Q",), sampling=SamplingParams(max_tokens=8))
    stream = recording.generate(request)
    assert (await anext(stream)).text == "one"
    await stream.aclose()
    replay = ReplayBackend(path).generate(request)
    assert (await anext(replay)).text == "one"
    with pytest.raises(NotRecorded, match="cancelled after 1 chunks"):
        await anext(replay)


def test_the_file_is_whole_after_each_request(tmp_path):
    path = tmp_path / "run.jsonl"
    seen = []

    @rm.function
    def program(s):
        s += "Q" + rm.gen("x")
        s["x"]
        seen.append(path.read_bytes())

    program.run(backend=RecordingBackend(rm.ScriptedBackend(["a"]), path))
    assert seen[0].endswith(b"\n")
    assert len(seen[0].splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "line 1"), ("[]\n", "line 1"), ('{"ramify_recording": 9}\n', "line 1"), (None, "cannot be read")],
)
def test_what_is_no_recording_is_refused(tmp_path, text, problem):
    path = tmp_path / "run.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidRequest, match=problem):
        ReplayBackend(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r"\Z", "{}\n", r"line \d+, is not of a recording"),
        ('"ramify_recording":1', '"ramify_recording":2', "version 2"),
    ],
)
def test_a_broken_line_and_another_version_are_named(recorded, old, new, message):
    path, _ = recorded
    path.write_text(re.sub(old, new, path.read_text(), count=1))
    with pytest.raises(InvalidRequest, match=message):
        ReplayBackend(path)


def test_what_the_backend_can_do_beside_is_passed_on(tmp_path):
    recording = RecordingBackend(backend(), tmp_path / "run.jsonl")
    assert rm.flush_cache(recording) is True
    with pytest.raises(AttributeError, match="no attribute 'requests'"):
        recording.requests  # noqa: B018
    assert getattr(recording, "await_tools", None) is None


async def test_a_recorded_backend_is_told_of_tools_that_run(tmp_path):
    told = []

    class Told(rm.ScriptedBackend):
        async def await_tools(self, program, branch, tools):
            told.append((program, branch, tools))

    await RecordingBackend(Told([]), tmp_path / "run.jsonl").await_tools("p", "0", ("add",))
    assert told == [("p", "0", ("add",))]
