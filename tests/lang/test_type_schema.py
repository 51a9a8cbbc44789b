"""Random outputs of a type's schema are accepted by pydantic."""

from __future__ import annotations

import datetime
import uuid
from typing import Annotated, Any

import pydantic
import pytest

import ramify as rm

pytestmark = pytest.mark.slow

Short = Annotated[str, pydantic.Field(max_length=2)]
Key = Annotated[str, pydantic.Field(pattern="^[ab]$")]

KINDS: list[Any] = [
    dict[int, bool],
    dict[float, bool],
    dict[bool, bool],
    dict[Key, Short],
    dict[datetime.date, bool],
    dict[pydantic.UUID4, bool],
    datetime.date,
    datetime.datetime,
    datetime.timedelta,
    uuid.UUID,
    pydantic.UUID4,
    pydantic.IPvAnyAddress,
    pydantic.HttpUrl,
    pydantic.AnyUrl,
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_random_outputs_are_values_of_their_type(engine: rm.Engine, kind: Any) -> None:
    @rm.function
    def ask(s: rm.ProgramState, seed: int) -> None:
        s += "x" + rm.gen("value", schema=kind, max_tokens=160, temperature=2, seed=seed)

    states = ask.run_batch([{"seed": seed} for seed in range(24)], backend=engine)
    texts = {str(state["value"]) for state in states}  # raises where pydantic refuses one
    assert len(texts) > 2


def test_a_function_is_no_type() -> None:
    with pytest.raises(rm.InvalidConstraint, match="is a function, not a type"):
        rm.gen("value", schema=lambda x: x)
