"""Every error Ramify raises, in the client and in the server alike.

    RamifyError
    ├── InvalidRequest            400  a field is wrong; says which one and how to mend it
    │   ├── UnsupportedField      400  a field we do not honour
    │   ├── InvalidConstraint     400  a schema, regex or grammar; carries the JSON pointer
    │   └── PromptTooLong         400  prompt and budget do not fit the context or the KV pages
    ├── Unauthorized              401  missing or wrong API key
    ├── NotFound                  404  no such model, file or route
    ├── Overloaded                429  the queue is full; carries retry_after seconds
    ├── Cancelled                 499  aborted by its caller
    ├── EngineError               500  our fault
    │   ├── WorkerDied            503  a process of the ring died; the request may be sent again
    │   └── EngineClosed          503  shut down, draining, or never started
    ├── RequestTimeout            504  a time limit of the caller passed
    ├── BackendError              502  a remote endpoint answered with an error
    └── ProgramError                   a step of a program failed; raised where its variable is read
        ├── UnsupportedNode            this backend cannot run that step
        └── CompileError               a program cannot be made a graph; says at which line

`to_info` and `from_info` carry an error across processes without pickling.
"""

from __future__ import annotations

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


class RamifyError(Exception):
    """Base of all errors; `status` is the HTTP status that the server answers with."""

    code: ClassVar[str] = "ramify_error"
    status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        pointer: str | None = None,
        remedy: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.pointer = pointer
        self.remedy = remedy
        self.retry_after = retry_after

    def __str__(self) -> str:
        where = f"At {self.pointer}: " if self.pointer else ""
        return f"{where}{self.message} {self.remedy or ''}".rstrip()

    def to_info(self) -> ErrorInfo:
        return ErrorInfo(
            code=self.code,
            message=self.message,
            field=self.field,
            pointer=self.pointer,
            remedy=self.remedy,
            retry_after=self.retry_after,
        )


class InvalidRequest(RamifyError):
    code = "invalid_request"
    status = 400


class UnsupportedField(InvalidRequest):
    code = "unsupported_field"


class InvalidConstraint(InvalidRequest):
    code = "invalid_constraint"


class PromptTooLong(InvalidRequest):
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


class Cancelled(RamifyError):
    code = "cancelled"
    status = 499


class EngineError(RamifyError):
    code = "engine_error"
    status = 500


class WorkerDied(EngineError):
    code = "worker_died"
    status = 503


class EngineClosed(EngineError):
    code = "engine_closed"
    status = 503


class RequestTimeout(RamifyError):
    code = "timeout"
    status = 504


class BackendError(RamifyError):
    code = "backend_error"
    status = 502


class ProgramError(RamifyError):
    """A failed step. `variable` names it, `line` is the caller's file:line, `__cause__` says why.

    `prompt` and `partial` hold what was sent and what had come back, when known.
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


class UnsupportedNode(ProgramError):
    code = "unsupported_node"


class CompileError(ProgramError):
    code = "compile_error"


def _all_errors(root: type[RamifyError]) -> list[type[RamifyError]]:
    return [root] + [leaf for child in root.__subclasses__() for leaf in _all_errors(child)]


_BY_CODE = {error.code: error for error in _all_errors(RamifyError)}


def from_info(info: ErrorInfo) -> RamifyError:
    """The exception that `info` describes; an unknown code becomes a plain `RamifyError`."""
    kind = _BY_CODE.get(info.code, RamifyError)
    return kind(
        info.message,
        field=info.field,
        pointer=info.pointer,
        remedy=info.remedy,
        retry_after=info.retry_after,
    )
