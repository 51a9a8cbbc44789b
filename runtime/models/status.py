"""The state of a model of a pool, and the error for one that does not fit."""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.errors import EngineError

ModelState = Literal["unloaded", "loading", "ready", "unloading", "failed"]


class ModelDoesNotFit(EngineError):
    """The error 503: a model needs more memory than unloading others would free."""

    code = "model_does_not_fit"
    status = 503


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model of a pool. Sizes are in bytes."""

    name: str
    model: str
    """The model's path, or its name on the hub."""
    state: ModelState
    pinned: bool
    users: int
    """Requests that use the model: running, or in its queue."""
    waiting: int
    """Requests that wait until the model is loaded."""
    size: int | None
    """Weights in memory, by the model's headers; None if these are not on this machine."""
    need: int | None
    """Memory that is set aside for the model: `size`, all KV pages, and a workspace."""
    resident: int | None
    """Resident memory of the model's processes, as `measure` found it; None unless the model is ready."""
    context_length: int | None
    """Tokens of prompt and output together; None if the headers are not on this machine."""
    kv_tokens: int | None
    """Tokens for which the last start made room in KV pages; None before the first one."""
    keep_alive_s: float | None
    """Seconds that the model stays loaded after its last request; None: for ever."""
    expires_in_s: float | None
    """Seconds until the model is unloaded; None while it is used, or if it stays."""
    error: str | None
    """The error of the last start, if the state is failed."""
