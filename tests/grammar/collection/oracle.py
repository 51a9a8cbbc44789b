"""Judgement of instances by the jsonschema package, with formats checked by the standard library."""

from __future__ import annotations

import base64
import binascii
import datetime
import ipaddress
import json
import re
import uuid
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import jsonschema
from jsonschema.validators import validator_for

CHECKER = jsonschema.FormatChecker(formats=())
_TIME = re.compile(r"\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def _checks(name: str, raises: tuple[type[Exception], ...] = (ValueError,)):
    def register(check):
        return CHECKER.checks(name, raises)(
            lambda value: not isinstance(value, str) or check(value) is not False
        )

    return register


@_checks("date")
def _date(text: str) -> bool:
    return re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) is not None and bool(
        datetime.date.fromisoformat(text)
    )


@_checks("time")
def _time(text: str) -> bool:
    text = re.sub(r"^23:59:60(\.\d+)?([Zz]|[+-]00:00)$", "23:59:59Z", text, flags=re.ASCII)
    return _TIME.fullmatch(text) is not None and bool(
        datetime.time.fromisoformat(re.sub(r"\.\d+", "", text).upper().replace("Z", "+00:00")) or True
    )


@_checks("date-time")
def _date_time(text: str) -> bool:
    return text[10:11] in ("T", "t") and _date(text[:10]) and _time(text[11:])


@_checks("email")
def _email(text: str) -> bool:
    local, _, domain = text.rpartition("@")
    quoted = re.fullmatch(r'"([ !#-\[\]-~]|\\[ -~])*"', local)
    plain = re.fullmatch(r"[^@\s\"(),:;<>\[\\\]]+", local, re.ASCII)
    if not quoted and not (plain and _dotted(local)):
        return False
    if not domain.startswith("["):
        return _hostname(domain)
    if domain.startswith("[IPv6:"):
        return domain.endswith("]") and _ipv6(domain[6:-1])
    return domain.endswith("]") and _ipv4(domain[1:-1])


def _dotted(local: str) -> bool:
    return all(local.split("."))


@_checks("hostname")
def _hostname(text: str) -> bool:
    labels = text.split(".")
    return len(text) < 254 and all(
        re.fullmatch(r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?", label) and label[2:4] != "--"
        for label in labels
    )


@_checks("ipv4")
def _ipv4(text: str) -> bool:
    return bool(ipaddress.IPv4Address(text)) or True


@_checks("ipv6")
def _ipv6(text: str) -> bool:
    return "%" not in text and (bool(ipaddress.IPv6Address(text)) or True)


@_checks("uri")
def _uri(text: str) -> bool:
    if not re.fullmatch(r"([a-zA-Z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9a-fA-F]{2})*", text):
        return False
    parts = urlsplit(text)
    return bool(re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", text)) and bool(parts.scheme) and text.count("#") < 2


@_checks("uri-reference")
def _uri_reference(text: str) -> bool:
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", text):
        return _uri(text)
    return _uri("x://host/" + text) and ":" not in re.split("[/?#]", text)[0]


@_checks("iri")
def _iri(text: str) -> bool:
    return _uri(_as_uri(text))


@_checks("iri-reference")
def _iri_reference(text: str) -> bool:
    return _uri_reference(_as_uri(text))


def _as_uri(iri: str) -> str:
    return re.sub(r"[\u00a0-\U0010ffff]", "%20", iri)


_VARIABLE = r"([A-Za-z0-9_]|%[0-9A-Fa-f]{2})(\.?([A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*(:[1-9][0-9]{0,3}|\*)?"
_URI_TEMPLATE = re.compile(
    rf"([!#$&()*+,./0-9:;=?@A-Z\[\]_a-z~'\u00a0-\U0010ffff-]|%[0-9A-Fa-f]{{2}}"
    rf"|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*"
)


@_checks("uri-template")
def _uri_template(text: str) -> bool:
    """RFC 6570, section 2."""
    return _URI_TEMPLATE.fullmatch(text) is not None


@_checks("duration")
def _duration(text: str) -> bool:
    """RFC 3339, appendix A."""
    time = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
    date = r"(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)"
    return re.fullmatch(rf"P(\d+W|{date}({time})?|{time})", text, re.ASCII) is not None


@_checks("uuid")
def _uuid(text: str) -> bool:
    return re.fullmatch(r"[0-9a-fA-F-]{36}", text) is not None and str(uuid.UUID(text)) == text.lower()


@_checks("json-pointer")
def _json_pointer(text: str) -> bool:
    return text == "" or (text.startswith("/") and re.search("~(?![01])", text) is None)


@_checks("regex", (re.error,))
def _regex(text: str) -> bool:
    return bool(re.compile(text))


@_checks("byte", (binascii.Error, ValueError))
def _byte(text: str) -> bool:
    return base64.b64encode(base64.b64decode(text, validate=True)) == text.encode() or _loose(text)


def _loose(text: str) -> bool:
    """The unused bits before the padding need not be zero."""
    return re.fullmatch(r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?", text) is not None


for _bits in (32, 64):

    def _in_range(value: object, low: int = -(1 << (_bits - 1)), high: int = 1 << (_bits - 1)) -> bool:
        return isinstance(value, bool | str | list | dict | None) or low <= value < high  # type: ignore[operator]

    CHECKER.checks(f"int{_bits}")(_in_range)
    CHECKER.checks(f"uint{_bits}")(partial(_in_range, low=0, high=1 << _bits))


def oracle(schema: Any) -> Callable[[str], bool]:
    """Whether a JSON text is an instance, as the jsonschema package judges it."""
    exact = _exact(json.dumps(schema))
    validator = validator_for(exact, default=jsonschema.Draft202012Validator)(exact, format_checker=CHECKER)
    return lambda text: validator.is_valid(_exact(text))


def _exact(text: str) -> Any:
    """The value with exact decimals: 627.93 is a multiple of 0.01, the nearest float is not."""
    return json.loads(text, parse_float=Decimal)
