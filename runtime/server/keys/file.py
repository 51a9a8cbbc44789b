"""The file of API keys (``--keys``): TOML with a table for each key.

[keys.alice]
hash = "sha256:5e88…"              # of the key, which is stored nowhere
concurrent_requests = 8
tokens_per_minute = 100000
models = ["qwen3-*"]
"""

from __future__ import annotations

import hashlib
import re
import secrets
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ramify.errors import InvalidRequest
from ramify.priority import checked_priority
from ramify.spelling import nearest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Names of keys and of scopes. They contain no "/", which ends the name in ids and scopes."""
HASH = re.compile(r"sha256:[0-9a-f]{64}")
MAX_KEYS = 1000
"""Maximum number of keys in a file. Each request is compared with all of them (0.2 us a key)."""
OWN = "own"
"""The value of `Key.scope` for a scope that no other key shares."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key, as the file has it. `name` is the name of its table."""

    name: str
    hash: str
    """SHA-256 of the key: "sha256:" and 64 hexadecimal digits."""
    scope: str = OWN
    """Cache scope. Keys that name the same scope find each other's prefixes; `OWN` is shared by none."""
    concurrent_requests: Count | None = None
    """Most HTTP requests that generate at a time; None for no limit, as below."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Most tokens of prompts and outputs a minute."""
    priority: int = 0
    """Priority of requests that name none."""
    max_priority: int | None = None
    """Highest priority that a request may name. None: `priority`."""
    max_pinned_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Share of the KV pages that its pins may hold, from 0 to 1. None: half of what all pins may hold."""
    models: tuple[str, ...] = ("*",)
    """Patterns of the names of models and adapters that it may use."""
    endpoints: tuple[str, ...] = ()
    """Patterns of the paths that it may use; empty for all that are for any key. A path for operators has to
    be written out."""
    admin: bool = False
    """Whether it may use the paths for operators."""

    @property
    def effective_max_priority(self) -> int:
        return self.priority if self.max_priority is None else self.max_priority


def hash_of(key: str | bytes) -> str:
    """The `Key.hash` of a key."""
    return "sha256:" + hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def new_key(name: str) -> tuple[str, str]:
    """(a new random key of 256 bits, its table for the file). Raises `InvalidRequest` for a wrong name."""
    _check_name("The name", name)
    key = "rk-" + secrets.token_urlsafe(32)
    quoted = f'"{name}"' if "." in name else name
    return key, f'[keys.{quoted}]\nhash = "{hash_of(key)}"\n'


def read_keys(path: Path) -> dict[str, Key]:
    """Name → key. Raises `InvalidRequest`, which names the file and the place in it, for a wrong file."""
    try:
        return _keys(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.", field="keys") from None
    except (ValueError, InvalidRequest) as error:  # also of TOML and of UTF-8
        raise InvalidRequest(f"{path}: {error}", field="keys") from None


def _keys(document: dict[str, Any]) -> dict[str, Key]:
    for name in document.keys() - {"keys"}:
        raise ValueError(f"{name} is unknown. A key is a table [keys.NAME].")
    tables = document.get("keys", {})
    if not isinstance(tables, dict) or not 0 < len(tables) <= MAX_KEYS:
        raise ValueError(f"there must be 1 to {MAX_KEYS} tables [keys.NAME].")
    found: dict[str, Key] = {}
    owners: dict[str, str] = {}
    for name, table in tables.items():
        key = found[name] = _key(name, table)
        if (other := owners.setdefault(key.hash, name)) != name:
            raise ValueError(f"keys.{name}.hash is that of keys.{other}.")
    return found


def _key(name: str, table: Any) -> Key:
    place = f"keys.{name}"
    _check_name(place, name)
    fields = [field for field in Key.__struct_fields__ if field != "name"]
    if not isinstance(table, dict):
        raise ValueError(f"{place} is no table; write [{place}].")
    for field in table.keys() - set(fields):
        raise ValueError(f"{place}.{field} is unknown. {nearest(field, fields) or ''}".rstrip())
    try:
        key = msgspec.convert({**table, "name": name}, Key)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$")
        raise ValueError(f"{place}{where.rstrip('`')}: {problem}.") from None
    if not HASH.fullmatch(key.hash):
        raise ValueError(
            f"{place}.hash must be sha256: and 64 hexadecimal digits, as `ramify keys new` prints it."
        )
    _check_name(f"{place}.scope", key.scope)
    checked_priority(key.priority, f"{place}.priority")
    checked_priority(key.effective_max_priority, f"{place}.max_priority")
    if key.effective_max_priority < key.priority:
        raise ValueError(f"{place}.max_priority is below priority, {key.priority}.")
    return key


def _check_name(what: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"{what} is {name[:100]!r}; it must be 1 to 64 letters, digits and, behind the first, _.-"
        )
