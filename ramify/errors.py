"""Every error Ramify raises, in the client and in the server alike.

    RamifyError
    ├── InvalidRequest            400  a field is wrong; names the field and a remedy
    │   ├── UnsupportedField      400  a field or value that Ramify does not support
    │   ├── InvalidConstraint     400  a schema, regex or grammar is wrong; carries the JSON pointer
    │   └── PromptTooLong         400  prompt and max_tokens do not fit the context or the KV pages
    ├── Unauthorized              401  missing or wrong API key
    ├── NotFound                  404  no such model, file or route
    ├── Overloaded                429  the queue is full; carries retry_after seconds
    ├── Cancelled                 499  the caller aborted the request
    ├── EngineError               500  the engine failed
    │   ├── WorkerDied            503  a process of the engine died; the request may be sent again
    │   └── EngineClosed          503  shut down, draining, or never started
    ├── RequestTimeout            504  a time limit set by the caller passed
    ├── BudgetExceeded            400  a limit on the time, tokens or calls of a program is reached
    ├── BackendError              502  a remote endpoint answered with an error
    └── ProgramError                   a step of a program failed; raised where its variable is read
        ├── UnsupportedNode            this backend cannot run that step
        └── CompileError               a program cannot be compiled to a graph; names the line

`to_info` and `from_info` carry an error across processes without pickling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The wire form of a `RamifyError`."""

    code: str
    message: str
    field: str | None = None
    pointer: str | None = None
    remedy: str | None = None
    retry_after: float | None = None
    lengths: tuple[int, int, int] | None = None
    """See `PromptTooLong`."""


_FIELDS = [name for name in ErrorInfo.__struct_fields__ if name != "code"]


class RamifyError(Exception):
    """Base of all errors of Ramify. `status` is the HTTP status of the server's answer."""

    code: ClassVar[str] = "ramify_error"
    status: ClassVar[int] = 500
    fatal: bool = False
    """Whether the error ends the run of the program whose step fails with it. No program recovers from it."""
    transient: bool = False
    """Whether the same request may succeed later, such as after a lost connection, or when a server is
    overloaded or restarts."""
    begun: bool = False
    """Whether the server may have worked on the request before it failed, so that a further attempt would
    cost again."""
    sent: int = 1
    """Number of times that the request was sent, the failed attempt included."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        pointer: str | None = None,
        remedy: str | None = None,
        retry_after: float | None = None,
        lengths: tuple[int, int, int] | None = None,
        transient: bool | None = None,
        begun: bool = False,
    ) -> None:
        super().__init__(message)
        if transient is not None:
            self.transient = transient
        self.begun = begun
        self.message = message
        self.field = field
        self.pointer = pointer
        self.remedy = remedy
        self.retry_after = retry_after
        self.lengths = lengths
        self.others: tuple[RamifyError, ...] = ()
        """Errors in other fields of the same request. The text of this error names these fields."""

    def __str__(self) -> str:
        others = ", ".join(str(other.field) for other in self.others)
        return f"{self.text} Also wrong: {others}." if others else self.text

    @property
    def text(self) -> str:
        """The message with the place and the remedy, without the other wrong fields."""
        where = f"At {self.pointer}: " if self.pointer else ""
        return f"{where}{self.told} {self.remedy or ''}".rstrip()

    @property
    def told(self) -> str:
        """The message; if the request was sent more than once, also the number of attempts."""
        return self.message if self.sent == 1 else f"{self.message} The request was sent {self.sent} times."

    def to_info(self) -> ErrorInfo:
        return ErrorInfo(code=self.code, **{name: getattr(self, name) for name in _FIELDS})


class InvalidRequest(RamifyError):
    code = "invalid_request"
    status = 400


class UnsupportedField(InvalidRequest):
    code = "unsupported_field"


class InvalidConstraint(InvalidRequest):
    code = "invalid_constraint"


class PromptTooLong(InvalidRequest):
    """`lengths`: tokens of the prompt, tokens asked for (0 if none were), and the most that both may have
    together. None if the prompt was not tokenised.

    The messages have OpenAI's words, by which agents know that they must shorten the conversation.
    """

    code = "context_length_exceeded"


class Unauthorized(RamifyError):
    code = "unauthorized"
    status = 401


class NotFound(RamifyError):
    code = "not_found"
    status = 404


class Overloaded(RamifyError):
    code = "overloaded"
    status = 429
    transient = True


class Cancelled(RamifyError):
    code = "cancelled"
    status = 499


class EngineError(RamifyError):
    code = "engine_error"
    status = 500


class WorkerDied(EngineError):
    code = "worker_died"
    status = 503
    transient = True


class EngineClosed(EngineError):
    code = "engine_closed"
    status = 503


class RequestTimeout(RamifyError):
    code = "timeout"
    status = 504


class BudgetExceeded(RamifyError):
    """A limit of a program, or of a block of a program, is reached.

    It is the cause of the `ProgramError` of each step that failed by it.

    `field` is the option that sets the limit: ``timeout``, ``max_total_tokens`` or ``max_calls``. `bound` is
    the option's value. `spent` is the amount spent when the step ended, in seconds, tokens or calls. `bound`
    and `spent` are None if a server sent the error. A step may also fail while `spent` is less than `bound`,
    if its prompt needs more tokens than are left.
    """

    code = "budget_exceeded"
    status = 400

    def __init__(
        self, message: str, *, bound: float | None = None, spent: float | None = None, **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.bound = bound
        self.spent = spent


class BackendError(RamifyError):
    code = "backend_error"
    status = 502


class ProgramError(RamifyError):
    """A failed step.

    `variable` is the variable that the step sets. `line` is the place of the step in the user's program, as
    file:line. `__cause__` is the reason. `prompt` is the text that was sent, and `partial` is the output up
    to the failure; both are None for a step that sent no request.
    """

    code = "program_error"

    def __init__(
        self,
        message: str,
        *,
        variable: str | None = None,
        line: str | None = None,
        prompt: str | None = None,
        partial: str | None = None,
        finish_reason: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.variable = variable
        self.line = line
        self.prompt = prompt
        self.partial = partial
        self.finish_reason = finish_reason
        self.noticed = False
        """Whether the body of the program has received this error. Such an error is not raised again at the
        end."""

    def notice(self) -> None:
        """Note that the program's body has received this error, and with it the error of the failed step that
        caused it."""
        error: BaseException | None = self
        while isinstance(error, ProgramError):
            error.noticed = True
            error = error.__cause__


class UnsupportedNode(ProgramError):
    code = "unsupported_node"


class CompileError(ProgramError):
    code = "compile_error"


def is_transient(error: BaseException | None) -> bool:
    """Whether `error`, or an error that caused it, is `transient`."""
    return any(getattr(one, "transient", False) for one in _causes(error))


def fatal_cause(error: BaseException | None) -> RamifyError | None:
    """The first of `error` and the errors that caused it that is `fatal`; None if there is none."""
    return next((one for one in _causes(error) if isinstance(one, RamifyError) and one.fatal), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _all_errors(root: type[RamifyError]) -> list[type[RamifyError]]:
    return [root] + [leaf for child in root.__subclasses__() for leaf in _all_errors(child)]


_BY_CODE = {error.code: error for error in _all_errors(RamifyError)}


def from_info(info: ErrorInfo) -> RamifyError:
    """The exception that `info` describes; an unknown code becomes a plain `RamifyError`."""
    kind = _BY_CODE.get(info.code, RamifyError)
    return kind(**{name: getattr(info, name) for name in _FIELDS})
