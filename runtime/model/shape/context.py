"""The context of an engine: the model's own, a shorter or a longer one, and notes about it for users."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from ramify.errors import InvalidRequest
from ramify.runtime.model.shape.config import ModelConfig, ModelShape

Shape = TypeVar("Shape", bound=ModelShape)

MOST_TOKENS = 1 << 24
"""Longest context: positions are multiplied in float32, which represents all integers up to this one."""


def with_context(config: Shape, context_length: int | None) -> Shape:
    """`config` with the context length `context_length`, in tokens; None: `default_context_length`.

    Raises `InvalidRequest` if `context_length` exceeds the longest context of the model.
    """
    if context_length is None:
        return replace(config, context_length=config.default_context_length)
    most, reason = _most(config)
    if not 1 <= context_length <= most:
        raise InvalidRequest(
            f"context_length is {context_length}; this model takes 1 to {most} tokens: {reason}.",
            field="context_length",
            remedy="Leave it out, or extend the model by rope_scaling (--rope-scaling)."
            if config.rope_kinds
            else "Leave it out: the engine takes the model's own.",
        )
    return replace(config, context_length=context_length)


def _most(config: ModelShape) -> tuple[int, str]:
    """(longest context that can be asked for, reason of this limit)."""
    native = isinstance(config, ModelConfig)
    kinds = config.rope_kinds
    for kind in ("dynamic",) if native else ("dynamic", "longrope"):
        if kind in kinds:
            return config.default_context_length, f"beyond them its rope_type {kind!r} rotates {_BY_LENGTH}"
    if not native and not kinds:
        return config.context_length, "it has learned no further positions"
    return MOST_TOKENS, "further positions are not exact in float32"


_BY_LENGTH = "all tokens of a request by its length, and cached keys are rotated already"


def context_notes(config: ModelShape, context_length: int | None) -> list[str]:
    """Notes for the log and for `ramify inspect`, if the context is by default shorter than the model's own,
    is longer than the model's own, or makes answers differ from transformers'; else empty.

    config : the model's own shape, before `with_context`
    """
    notes = []
    border, own = config.default_context_length, config.context_length
    found = border if context_length is None else context_length
    if context_length is None and border < own:
        longer = (
            f" With --context-length N above {border} every request has the long factors."
            if isinstance(config, ModelConfig)
            else ""
        )
        notes.append(
            f"The context is {border} tokens of the model's {own}: beyond them longrope takes its long "
            f"factors, for {_BY_LENGTH}.{longer}"
        )
    if found > border and "longrope" in config.rope_kinds:
        notes.append(
            f"context_length is {found}, above longrope's original {border}: every request has the long "
            f"factors. transformers takes the short ones for requests of up to {border} tokens, so other "
            "tokens may come out here."
        )
    if found > own:
        notes.append(
            f"context_length is {found}, and this model was made for {own} tokens: it may write nonsense "
            "beyond them. Where its makers give an extension, name it by --rope-scaling."
        )
    return notes
