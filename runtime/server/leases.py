"""The program and the lease of a request that any client sends, by headers or by fields of its API.

x-ramify-program: nightly      its requests share leases, a flow of the queue and a row of the dashboard
x-ramify-lease: 600            seconds for which its prompt and answer stay in the cache after they are done
prompt_cache_key: "nightly"    OpenAI's field for the first
prompt_cache_retention: "24h"  OpenAI's field for the second

Leased pages are evicted after all others, so a lease keeps no request from running. A lease ends by itself
when its time is over: a client that goes away leaves nothing behind. Nobody says when such a program ends, so
it is a session (`ProgramHint.session`).
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ProgramHint
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.service import CLIENT
from ramify.runtime.server.tables.openai import PROMPT_CACHE_OPTIONS
from ramify.text import quoted

PROGRAM_HEADER = "x-ramify-program"
LEASE_HEADER = "x-ramify-lease"
SESSION_HEADERS = (
    "x-claude-code-session-id",  # Claude Code
    "session-id",  # Codex
    "session_id",
    "x-session-affinity",  # OpenCode
    "x-session-id",
)
"""Headers in which agents send the id of a session, which names the program where nothing else does."""

PROGRAM_LEASE_S = 300.0
"""Lease of a request of a program, if the client names no time. OpenAI and Anthropic keep a prefix for five
minutes."""
MAX_PROGRAM = 256
"""Maximum length of a program's id, in characters."""
RETENTIONS = {"in_memory": PROGRAM_LEASE_S, "in-memory": PROGRAM_LEASE_S, "24h": 86_400.0}
"""Value of ``prompt_cache_retention`` → seconds."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def lease_seconds(ttl: str, field: str) -> float:
    """The seconds of `ttl`, such as "5m" or "1h", as OpenAI's and Anthropic's APIs write them."""
    found = re.fullmatch(r"(\d{1,6})([smhd])", ttl)
    if found is None:
        given = quoted(ttl)
        raise InvalidRequest(f'{field} is {given}; it must be a time such as "5m" or "1h".', field=field)
    return float(found[1]) * _UNITS[found[2]]


def take_hint(
    fields: Fields, scope: str, rid: str, *, session: str = "", lease_s: float | None = None
) -> ProgramHint | None:
    """Take OpenAI's fields about the prompt cache, and return what `hint_of` returns for them."""
    key: str = fields.take("prompt_cache_key", str, "")
    _check_length(key, fields.path("prompt_cache_key"))
    times = [] if lease_s is None else [lease_s]
    retention: str | None = fields.take("prompt_cache_retention", str)
    if retention is not None:
        if retention not in RETENTIONS:
            known = " and ".join(name for name in RETENTIONS if "-" not in name)
            given, path = quoted(retention), fields.path("prompt_cache_retention")
            raise UnsupportedField(f"{path} is {given}; only {known} are supported.", field=path)
        times.append(RETENTIONS[retention])
    options = fields.take_object("prompt_cache_options")
    if options is not None:
        ttl: str | None = options.take("ttl", str)
        if ttl is not None:
            times.append(lease_seconds(ttl, options.path("ttl")))
        options.finish(PROMPT_CACHE_OPTIONS)
    return hint_of(fields, scope, rid, session=key or session, lease_s=max(times, default=None))


def hint_of(
    fields: Fields, scope: str, rid: str, *, session: str = "", lease_s: float | None = None
) -> ProgramHint | None:
    """The hint of a request by its headers; None if it belongs to no program and asks for no lease.

    scope : the cache scope. Programs of different scopes are different.
    rid : id of the request, which is a program of its own if it names none and asks for a lease
    session : id of the session by a field of the body, if there is one. The header `PROGRAM_HEADER` goes
        before it, and `SESSION_HEADERS` come after it.
    lease_s : lease by a field of the body. `LEASE_HEADER` goes before it.
    """
    headers = fields.body.headers
    program = headers.get(PROGRAM_HEADER, "")
    _check_length(program, PROGRAM_HEADER)
    program = program or session or next((headers[name] for name in SESSION_HEADERS if name in headers), "")
    if (given := headers.get(LEASE_HEADER)) is not None:
        lease_s = _seconds(given)
    if not program and not lease_s:
        return None
    if lease_s is None:
        lease_s = PROGRAM_LEASE_S
    program = scoped(program[:MAX_PROGRAM] or rid, scope)
    name = CLIENT.get().partition("/")[0][:40]  # without its version
    return ProgramHint(program=program, name=name or "program", lease_s=lease_s, session=True)


def client_program(fields: Fields) -> str:
    """The program that the client names itself; "" if it names none."""
    return fields.body.headers.get(PROGRAM_HEADER) or fields.take("prompt_cache_key", str, "")


def scoped(program: str, scope: str) -> str:
    """The id of a client's program in the engine. Programs of different scopes have different ids."""
    return f"{program}@{hashlib.sha256(scope.encode()).hexdigest()[:8]}" if scope else program


def _seconds(given: Any) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidRequest(
            f"{LEASE_HEADER} is {quoted(given)}; it must be a number of seconds, 0 or more.",
            field=LEASE_HEADER,
        )
    return seconds


def _check_length(program: str, field: str) -> None:
    if len(program) > MAX_PROGRAM:
        raise InvalidRequest(
            f"{field} has {len(program)} characters; at most {MAX_PROGRAM} are taken.", field=field
        )
