"""Errors that must not stop anything else: they are logged, or reported to the sender of a message."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from ramify.errors import EngineError, InvalidRequest, RamifyError

log = logging.getLogger("ramify")


@contextlib.contextmanager
def errors_logged(doing: str) -> Iterator[None]:
    """Log an exception that the block raises, with its traceback, and continue after the block.

    doing : name of the block's work for the log, such as "placing a request"
    """
    try:
        yield
    except Exception:
        log.exception("%s failed", doing)


def unsendable(error: Exception) -> RamifyError:
    """The error to report to the sender of a message, when sending the message raised `error`."""
    if isinstance(error, RamifyError):
        return error
    if isinstance(error, UnicodeEncodeError):
        return InvalidRequest("A text in the request is not valid Unicode.")
    if isinstance(error, OverflowError):
        return InvalidRequest("A number in the request does not fit into 64 bits.")
    if isinstance(error, TypeError):
        return InvalidRequest(f"A value in the request has a wrong type: {error}")
    return EngineError(f"The request could not be sent: {type(error).__name__}: {error}")
