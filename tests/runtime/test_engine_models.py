"""`Engine(models={…})`: several models in one engine, each in processes of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

import ramify as rm
from ramify.errors import InvalidRequest, NotFound, UnsupportedField
from tests.lang.engines import OPTIONS, write_long
from tests.runtime.tiny import write_model, write_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two models with other weights and another context."""
    path = tmp_path_factory.mktemp("models")
    small, big = write_long(path / "small"), path / "big"
    big.mkdir()
    write_model(big, context_length=8192, seed=5)
    write_tokenizer(big)
    return {"small": str(small), "big": str(big)}


@pytest.fixture(scope="module")
def engine(models: dict[str, str]) -> Iterator[rm.Engine]:
    with rm.Engine(models=models, **OPTIONS) as engine:
        yield engine


@rm.function
def both(s: rm.ProgramState, about: str) -> str:
    s += about + rm.gen("draft", max_tokens=6, temperature=0)
    s += rm.gen("better", model="big", max_tokens=6, temperature=0)
    for branch in s.fork(2):
        branch += rm.select("kind", ["a", "b"], model="big")
    s += rm.decide("good", bool, "Is it good?", model="big")
    s += rm.gen("final", max_tokens=4, temperature=0)
    return s["final"]


def test_the_steps_of_a_program_run_on_the_models_that_they_name(
    engine: rm.Engine, models: dict[str, str]
) -> None:
    state = both.run(about="Trams", backend=engine)
    compiled = both.compile().run(about="Trams", backend=engine)
    with rm.Engine(models["big"], **OPTIONS) as big:
        named = both.run(about="Trams", backend=rm.Router({"small": engine, "big": big}))
    for one in (compiled, named):
        assert [one[name] for name in ("draft", "better", "final")] == [
            state[name] for name in ("draft", "better", "final")
        ]
        assert one["good"].probabilities == state["good"].probabilities
    assert set(state.usage_by_model) == {"small", "big"}
    assert sum(one.prompt_tokens for one in state.usage_by_model.values()) == state.usage.prompt_tokens
    shown = str(state.trace)
    assert "gen draft  small" in shown
    assert "gen better  big" in shown
    other = both.run(about="Trams", backend=engine, model="big")
    assert set(other.usage_by_model) == {"big"}


def test_a_model_of_several_is_an_engine(engine: rm.Engine) -> None:
    big = engine.model("big")
    assert big is engine.model("big")
    assert big.model("small") is engine
    asked = {"max_tokens": 6, "temperature": 0}
    assert big.complete("Trams", **asked).text != engine.complete("Trams", **asked).text
    assert big.get_server_info()["model_info"]["context_length"] == 8192
    assert big.stats().pages_total > 0
    assert [one.name for one in engine.models] == ["small", "big"]
    assert {one.state for one in engine.models} == {"ready"}
    assert set(engine.pids) == {f"{name}/{role}" for name in ("small", "big") for role in big.pids}
    assert "big ready" in repr(engine)
    assert "model big" in engine._repr_html_()
    before = big.pids
    big.unload()
    assert "big unloaded" in repr(engine)
    assert big.pids == {}
    assert big.complete("Trams", **asked).text
    assert before != big.pids


def test_a_crash_of_one_model_touches_no_other(engine: rm.Engine) -> None:
    big = engine.model("big")
    pids = engine.start().pids
    text = big.complete("Trams", max_tokens=4, temperature=0).text
    os.kill(big.pids["scheduler"], signal.SIGKILL)
    engine.complete("Trams", max_tokens=4)
    state = both.run(about="Trams", backend=engine)
    assert state["better"]
    assert big.complete("Trams", max_tokens=4, temperature=0).text == text
    assert {role: pid for role, pid in engine.pids.items() if role.startswith("small/")} == {
        role: pid for role, pid in pids.items() if role.startswith("small/")
    }


def test_a_pin_of_a_model(engine: rm.Engine) -> None:
    @rm.function
    def read(s: rm.ProgramState) -> None:
        s += "A long manual about trams, which many questions are about." + rm.gen("x", max_tokens=2)

    with rm.pin(read.run(backend=engine, model="big"), seconds=600) as held:
        assert held.owner in [one.owner for one in engine.model("big").cache().holds]
        assert held.owner not in [one.owner for one in engine.cache().holds]


def test_wrong_names_are_refused(engine: rm.Engine, models: dict[str, str]) -> None:
    @rm.function
    def wrong(s: rm.ProgramState) -> None:
        s += "a" + rm.gen("x", model="bigg")

    for refused in (
        lambda: wrong.run(backend=engine),
        lambda: both.run(about="a", backend=engine, model="bigg"),
    ):
        with pytest.raises((NotFound, rm.ProgramError), match="Did you mean big"):
            refused()
    one = rm.Engine(models["small"], **OPTIONS)
    with pytest.raises(UnsupportedField, match="has one model"):
        one.model("big")
    with pytest.raises(UnsupportedField, match="keep_alive"):
        rm.Engine(models["small"], keep_alive=5)
    with pytest.raises(InvalidRequest, match="both"):
        rm.Engine(models["small"], models=models)
    with pytest.raises(InvalidRequest, match="empty"):
        rm.Engine(models={})
    with pytest.raises(NotFound):
        rm.Engine(models=models, pin=["bigger"])
