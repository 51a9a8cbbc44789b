"""One program on an engine and on a server of the same model under another name."""

from __future__ import annotations

import pytest

import ramify as rm
from tests.end_to_end.served import serve

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(240)]


@rm.function
def talk(s):
    s += rm.system("You are terse.") + rm.user("Name a colour of the rainbow.")
    s += rm.assistant(rm.gen("colour", max_tokens=8))
    s += rm.user("Name a fruit of that colour.") + rm.assistant(
        rm.gen("fruit", max_tokens=12, backend="remote")
    )
    s += rm.user("Is it sweet?") + rm.assistant(rm.gen("sweet", choices=["yes", "no"]))
    s += rm.user("Describe it.") + rm.assistant(rm.gen("described", max_tokens=24, backend="remote"))


@pytest.mark.long
def test_each_model_finds_its_prefix_and_the_programs_text_is_one():
    with serve("--served-model-name", "other") as served, rm.Engine() as engine:
        remote = rm.RuntimeEndpoint(served.url)
        state = talk.run(backend=rm.Router({"local": engine, "remote": remote}), temperature=0)
        alone = talk.run(backend=rm.Router({"local": engine, "remote": engine}), temperature=0)
        remote.close()
    assert state.error() is None
    assert [call.model for call in state.trace.children] == ["local", "remote", "local", "remote"]
    colour, fruit, sweet, described = state.trace.children
    assert described.prompt.startswith(sweet.prompt + state["sweet"])
    assert state.text() == described.prompt + state["described"] + "<|im_end|>\n"
    known = fruit.usage.prompt_tokens + fruit.usage.completion_tokens - 1
    assert described.usage.cached_tokens >= known
    assert sweet.usage.cached_tokens >= colour.usage.prompt_tokens
    # The same model in another process writes the same, but for the places where its tokens are cut anew.
    assert alone["fruit"] == state["fruit"]
    assert (
        sum(usage.completion_tokens for usage in state.usage_by_model.values())
        == state.usage.completion_tokens
    )
