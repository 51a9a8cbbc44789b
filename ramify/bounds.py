"""Bounds on what a program, or a block of it, may spend: time, tokens, and requests to the model."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ramify.errors import InvalidRequest


class Bounds(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The options of a limit. None: no bound.

    timeout : seconds of wall-clock time since the beginning of the run or block
    max_total_tokens : prompt and completion tokens of all requests, as `Usage` counts them
    max_calls : requests to the model. A `select` is one request; each sample and each retry of a `gen` is one
    """

    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    max_total_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_calls: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            kinds: tuple[type, ...] = (int, float) if name == "timeout" else (int,)
            if value is not None and (type(value) not in kinds or not value > 0):
                more = "more than 0" if name == "timeout" else "a whole number, 1 or more"
                raise InvalidRequest(f"{name} is {value!r}; it must be {more}.", field=name)

    def __bool__(self) -> bool:
        return any(value is not None for value in msgspec.structs.astuple(self))

    def __str__(self) -> str:
        given = msgspec.structs.asdict(self).items()
        return ", ".join(f"{name}={value}" for name, value in given if value is not None)
