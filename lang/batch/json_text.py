"""Rows and results as JSON text. Every row has a digest; a value without a JSON text raises `NotJson`.

float("nan"), float("-inf")      "NaN", "-Infinity", as in Protobuf's JSON: JSON has no such numbers
numpy.float32(1.5)               1.5
Path("a")                        "a", as str() has it
"\\ud800", [[[…]]] 3,000 deep     `NotJson`
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from ramify.lang.typed.decision import Decision, ModelDecision

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Text → its non-finite number."""
MOST_VALUES = 1 << 16
"""Most values that go into the digest of a row without a JSON text. A bound is needed because a row may
contain itself."""


class NotJson(ValueError):
    """The value has no JSON text; the message gives the reason."""


def encode(value: Any) -> bytes:
    """`value` as JSON text. A value whose type is not known to msgspec, numpy or pydantic is written as its
    str()."""
    try:
        return _encoded(value, _plain, None)
    except Exception as error:  # the str() of a user's type may raise anything
        raise NotJson(_reason(error)) from error


def canonical(value: Any) -> bytes:
    """Bytes that are equal for equal rows, in every process. A row without a JSON text has canonical bytes,
    too."""
    try:
        return _encoded(value, _stable, "deterministic")
    except Exception:
        return b"\0" + b" ".join(_parts(value))  # no JSON text begins with a zero byte


def valid(text: str) -> str:
    """`text` with lone surrogates, which UTF-8 cannot encode, written as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _encoded(value: Any, hook: Callable[[Any], Any], order: Literal["deterministic"] | None) -> bytes:
    data = msgspec.json.encode(value, enc_hook=hook, order=order)
    if b"null" not in data:  # msgspec writes NaN and infinities as null
        return data
    plain = _finite(msgspec.to_builtins(value, enc_hook=hook, str_keys=True, order=order))
    return msgspec.json.encode(plain, order=order)


def _finite(value: Any) -> Any:
    """`value`, made of builtin types, with NaN and infinities replaced by texts."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    known = _known(value)
    return str(value) if known is value else known


def _stable(value: Any) -> Any:
    """Substitute for `value` in a digest, the same in every process. str(value) is not used, because it may
    contain a memory address."""
    known = _known(value)
    return type(value).__qualname__ if known is value else known


def _known(value: Any) -> Any:
    """`value` as builtin types, if it is a mapping, a str subclass, or of a pydantic or numpy type; else
    `value`."""
    if isinstance(value, Decision | ModelDecision):
        return value.to_dict()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str):
        return str.__str__(value)
    for name, options in (("model_dump", {"mode": "json"}), ("tolist", {})):
        convert = getattr(type(value), name, None)  # not that of the value: a mock has any attribute
        if callable(convert):
            return convert(value, **options)
    return value


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"it has {error.object[error.start]!r}, a half of a surrogate pair, which is no character"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return f"{type(error).__name__}: {valid(str(error))}"


def _parts(value: Any) -> Iterator[bytes]:
    """Yield the bytes of all values nested in `value`, without recursion."""
    stack = [value]
    for _ in range(MOST_VALUES):
        if not stack:
            return
        one = stack.pop()
        if isinstance(one, str):
            yield b"%d:" % len(one) + one.encode(errors="surrogatepass")
        elif isinstance(one, bytes | bytearray):
            yield b"b%d:" % len(one) + bytes(one)
        elif isinstance(one, int | float | complex | None):
            yield repr(one).encode()
        elif isinstance(one, Mapping):
            yield b"{%d" % len(one)
            stack += [part for pair in one.items() for part in pair]
        elif isinstance(one, list | tuple):
            yield b"[%d" % len(one)
            stack += one
        elif isinstance(one, set | frozenset):
            yield b"<%d" % len(one) + b" ".join(sorted(map(canonical, one)))
        else:
            yield type(one).__qualname__.encode()
            with contextlib.suppress(Exception):  # raised by a user's type
                stack.append(_stable(one))
