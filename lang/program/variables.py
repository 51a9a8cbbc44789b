"""The results of steps, which readers wait for. Reading the result of a failed step raises its error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ramify.errors import InvalidRequest, ProgramError
from ramify.lang.common.event import Event
from ramify.messages import TextChunk

if TYPE_CHECKING:
    from ramify.lang.trace.calls import Call


class UnknownVariable(ProgramError, KeyError):
    """The error of reading a variable that no step of the program sets."""

    code = "unknown_variable"


class Skipped(ProgramError):
    """The error of reading a variable whose step was skipped, because the step's condition did not hold."""

    code = "skipped"


class Variable:
    """The result of a step, set once, by `resolve` or `fail`. Read `value` only after `ready` is set."""

    __slots__ = (
        "_meta",
        "call",
        "chunks",
        "error",
        "kind",
        "n",
        "name",
        "ready",
        "text",
        "thinking",
        "value",
    )

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.ready = Event()
        self.value: Any = None
        self.text: str | None = None
        """The generated text that `value` was parsed from; None if `value` was not parsed from text."""
        self.thinking: Any = None
        """The thoughts before `value`; a list if `value` is a list. None if the step has no setting of
        thinking."""
        self._meta: Any = None
        self.error: ProgramError | None = None
        self.chunks: list[TextChunk] = []
        self.kind: Any = None
        """The schema of the `gen` that sets the variable, as the user gave it; None without a schema."""
        self.n = 1
        """Number of outputs of the step. Above 1, `value` is the list of them, and `chunks` are those of the
        first."""
        self.call: Call | None = None
        """The call of the step that sets the variable; None before the step has begun."""

    def resolve(self, value: Any, *, text: str | None = None, meta: Callable[[], Any] | None = None) -> None:
        self.value, self.text, self._meta = value, text, meta
        self.ready.set()

    def take(self, other: Variable) -> None:
        """Set this variable to the result of `other`. Raises the error of `other` if `other` has failed."""
        self.call, self.kind, self.thinking = other.call, other.kind, other.thinking
        self.resolve(other.read(), text=other.text, meta=lambda: other.meta)

    @property
    def meta(self) -> Any:
        """The result of `get_meta_info`, which is computed at the first read."""
        if callable(self._meta):
            self._meta = self._meta()
        return self._meta

    def fail(self, error: ProgramError) -> None:
        if not self.ready.is_set():
            self.error = error
            self.ready.set()

    def read(self) -> Any:
        """The value; raises `ProgramError` if the step failed. `ready` must be set."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        return self.value

    def read_thinking(self) -> Any:
        """The thoughts. Raises the errors of `read`, and `InvalidRequest` if the step has no setting of
        thinking."""
        self.read()
        if self.thinking is None:
            raise InvalidRequest(
                f"The step of {self.name!r} says nothing about thinking, so it has no thoughts.",
                field="thinking",
                remedy="Write gen(..., thinking=True).",
            )
        return self.thinking


THOUGHTS = "_reasoning_content"
"""The suffix of the variable that holds the thoughts of another variable, as in SGLang:
NAME_reasoning_content for NAME."""


class ThoughtsVariable(Variable):
    """A variable whose value is the thoughts of `source`."""

    __slots__ = ("source",)

    def __init__(self, source: Variable) -> None:
        super().__init__(f"{source.name}{THOUGHTS}")
        self.source = source
        source.ready.on_set(self._follow)

    def _follow(self) -> None:
        if self.source.error is not None:
            self.fail(self.source.error)
        else:
            thoughts = self.source.thinking
            self.resolve(thoughts, text=thoughts if type(thoughts) is str else None)


class GatheredVariable(Variable):
    """The list of one variable's values over the branches of a fork."""

    __slots__ = ("parts",)

    def __init__(self, name: str, parts: Iterable[Variable]) -> None:
        super().__init__(name)
        self.parts = list(parts)
        for part in self.parts:
            part.ready.on_set(self._resolve_if_complete)

    def _resolve_if_complete(self) -> None:
        if all(part.ready.is_set() for part in self.parts) and not self.ready.is_set():
            failed = next((part.error for part in self.parts if part.error is not None), None)
            if failed is not None:
                self.fail(failed)
            else:
                values = [part.value for part in self.parts]
                thoughts = [part.thinking for part in self.parts]
                self.thinking = None if any(one is None for one in thoughts) else thoughts
                self.resolve(values, meta=lambda: [part.meta for part in self.parts])


def skipped(name: str | None) -> Skipped:
    what = "The variable" if name is None else repr(name)
    return Skipped(f"{what} was not set: the condition of its step did not hold.", variable=name)


def unknown_variable(name: str, known: Iterable[str]) -> UnknownVariable:
    names = ", ".join(sorted(map(repr, known)))
    return UnknownVariable(
        f"The program sets no variable {name!r}.",
        variable=name,
        remedy=f"It sets {names}." if names else "It sets none so far.",
    )
