"""Logging of the server and its processes: lines of text, or JSON lines with fields.

A line of JSON (`LogFormat` json)::

    {"time": "2026-11-28T03:40:00.123Z", "level": "info", "logger": "ramify.server", "process": "frontend",
     "message": "request", "request_id": "req_5f…", "rid": "…", "status": 200, "output_tokens": 12, …}

Fields beside the message are given as ``logger.info("…", extra=fields(status=200))``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal

LogFormat = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error", "critical")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request that is being handled, as its response names it in x-request-id; "" outside of
requests."""

_FIELDS = "ramify_fields"


def fields(**values: Any) -> dict[str, Any]:
    """The `extra` of a log call: fields of the JSON line. Fields that are None or "" are left out."""
    return {_FIELDS: {name: value for name, value in values.items() if value not in (None, "")}}


class JsonLines(logging.Formatter):
    """One JSON object a record, without line breaks. The field ``traceback`` has an exception's traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, ensure_ascii=False, default=str).encode("utf-8", "replace").decode()


class TextLines(logging.Formatter):
    """A record as text whose lines behind the first are indented, with control characters escaped: what a
    client has written never looks like a line of its own, and moves no cursor."""

    def format(self, record: logging.LogRecord) -> str:
        lines = [
            line if line.isprintable() else line.encode("unicode_escape").decode()
            for line in super().format(record).expandtabs().splitlines()
        ]
        return "\n  ".join(lines)


def configure_logging(level: str, format: LogFormat, process: str) -> None:
    """Log messages of at least `level` to standard error. `process` is the name of this process in each line.
    With json, warnings of Python's `warnings` are lines as well, and so is an exception that ends the
    process. Does nothing if the root logger has a handler."""
    handler = logging.StreamHandler(sys.stderr)
    if format == "json":
        handler.setFormatter(JsonLines(process))
        logging.captureWarnings(True)
        sys.excepthook = log_uncaught
    else:
        handler.setFormatter(TextLines(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An excepthook that logs the exception which ends the process."""
    logging.getLogger("ramify").critical("%s ends the process", kind.__name__, exc_info=(kind, error, trace))
