"""Regular expressions for texts that pydantic reads as values of Python types."""

from __future__ import annotations

import datetime

_UINT = "(0|[1-9][0-9]{0,17})"
FRACTION = f"^-?{_UINT}(/[1-9][0-9]{{0,17}})?$"
COMPLEX = f"^-?{_UINT}(\\.[0-9]{{1,17}})?[+-]{_UINT}(\\.[0-9]{{1,17}})?j$"

_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
NAIVE_DATETIME = (
    f"^({_YEAR}-{_DAY}|{_LEAP}-02-29)T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{{1,6}})?$"
)
"""Pattern of a date of the proleptic Gregorian calendar from year 1 on, with a time without an offset."""

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9a-f]{1,4}"
NETWORK = {
    4: f"^({_BYTE}\\.0\\.0\\.0/8|({_BYTE}\\.){{2}}0\\.0/16|({_BYTE}\\.){{3}}(0/24|{_BYTE}/32))$",
    6: f"^(({_HEX}:){{2}}:/32|({_HEX}:){{3}}:/48|({_HEX}:){{4}}:/64|({_HEX}:){{7}}{_HEX}/128)$",
}
"""Version of IP → pattern of a network. Only the usual prefix lengths are allowed, because a pattern must
ensure that the bits after the prefix are 0."""
INTERFACE = {
    4: f"^({_BYTE}\\.){{3}}{_BYTE}/(3[0-2]|[12]?[0-9])$",
    6: f"^({_HEX}:){{7}}{_HEX}/(12[0-8]|1[01][0-9]|[1-9]?[0-9])$",
}

_LAST = {"base64": "+/", "base64url": "_-"}
BASE64 = {
    name: f"^([A-Za-z0-9{last}]{{4}})*([A-Za-z0-9{last}]{{2}}==|[A-Za-z0-9{last}]{{3}}=)?$"
    for name, last in _LAST.items()
}
"""Name of an alphabet of RFC 4648 → pattern of base64 texts in this alphabet."""

# Of three bytes below 0x80, the zero top bits are in the first, second and third of four characters.
_FIRST, _SECOND, _THIRD = "[A-Za-f]", "[A-HQ-Xg-nw-z0-3]", "[ABEFIJMNQRUVYZcdghklopstwx014589]"
BASE64_TEXT = {
    name: f"^({_FIRST}{_SECOND}{_THIRD}[A-Za-z0-9{last}])*"
    f"({_FIRST}[AQgw]==|{_FIRST}{_SECOND}[AEIMQUYcgkosw048]=)?$"
    for name, last in _LAST.items()
}
"""Name of an alphabet → pattern of base64 texts that encode ASCII, which is valid UTF-8."""


def dates_between(low: datetime.date, high: datetime.date) -> str:
    """The pattern of texts that begin with a date from `low` to `high`, both included.

    Dates in ISO format are ordered like their texts. Example, from "2024-…" to "2026-…": "202" is followed by
    4 and a rest that is not before the rest of `low`, by 5 and any rest, or by 6 and a rest that is not after
    the rest of `high`.
    """
    return f"^{_between(low.isoformat(), high.isoformat())}"


def _between(low: str, high: str) -> str:
    if not low or not high:
        return ""
    if low[0] == high[0]:
        return low[0] + _between(low[1:], high[1:])
    if low[0] == "-":
        raise AssertionError("both have their signs at the same places")
    options = [low[0] + _from(low[1:]), high[0] + _up_to(high[1:])]
    if int(high[0]) - int(low[0]) > 1:
        options.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}]{_any(low[1:])}")
    return f"({'|'.join(options)})"


def _any(rest: str) -> str:
    return "".join("-" if char == "-" else "[0-9]" for char in rest)


def _from(low: str) -> str:
    """The pattern of texts that have digits and dashes in the places of `low`, and are not before `low`."""
    if not low or low[0] == "-":
        return low[:1] + (_from(low[1:]) if low else "")
    above = "" if low[0] == "9" else f"|[{int(low[0]) + 1}-9]{_any(low[1:])}"
    return f"({low[0]}{_from(low[1:])}{above})"


def _up_to(high: str) -> str:
    """The pattern of texts that have digits and dashes in the places of `high`, and are not after `high`."""
    if not high or high[0] == "-":
        return high[:1] + (_up_to(high[1:]) if high else "")
    below = "" if high[0] == "0" else f"|[0-{int(high[0]) - 1}]{_any(high[1:])}"
    return f"({high[0]}{_up_to(high[1:])}{below})"
