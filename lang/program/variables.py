"""The result of one step. Readers wait for it, and are raised the step's error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ramify.errors import ProgramError
from ramify.lang.program.event import Event
from ramify.messages import TextChunk

if TYPE_CHECKING:
    from ramify.lang.trace.calls import Call


class UnknownVariable(ProgramError, KeyError):
    """A variable was read that no step of the program sets."""

    code = "unknown_variable"


class Skipped(ProgramError):
    """A variable was read whose step was skipped, because its condition did not hold."""

    code = "skipped"


class Variable:
    """Set once, by `resolve` or `fail`. Read `value` only after `ready` is set."""

    __slots__ = ("_meta", "call", "chunks", "error", "kind", "name", "ready", "text", "value")

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.ready = Event()
        self.value: Any = None
        self.text: str | None = None
        """The generated text, from which `value` was parsed; None for a value that was not parsed."""
        self._meta: Any = None
        self.error: ProgramError | None = None
        self.chunks: list[TextChunk] = []
        """The chunks that have arrived so far."""
        self.kind: Any = None
        """The schema of its `gen`, as the user gave it."""
        self.call: Call | None = None
        """The call of the step that sets the variable; None before the step has begun."""

    def resolve(self, value: Any, *, text: str | None = None, meta: Callable[[], Any] | None = None) -> None:
        self.value, self.text, self._meta = value, text, meta
        self.ready.set()

    def take(self, other: Variable) -> None:
        """Set it to the result of `other`; raises that one's error."""
        self.call, self.kind = other.call, other.kind
        self.resolve(other.read(), text=other.text, meta=lambda: other.meta)

    @property
    def meta(self) -> Any:
        """The result of `get_meta_info`, made at the first read."""
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
