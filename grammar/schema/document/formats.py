"""The values of JSON Schema's ``format``, as patterns.

Some formats allow strings that would take too many states, such as leap seconds with an offset of hours. For
these, grammars write a subset of the format; the validator, and a negated format, use the whole format.
Formats that no specification defines restrict nothing, as JSON Schema says.
"""

from __future__ import annotations

from decimal import Decimal
from typing import NamedTuple

from ramify.grammar.schema.document.string_patterns import is_regex
from ramify.grammar.schema.document.unenforceable import refuse

_MONTH_DAY = (
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_YEAR = r"([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_BY_FOUR = r"(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = rf"([0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"
_DATE = rf"({_YEAR}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = r"([01][0-9]|2[0-3])"
_MINUTE = r"[0-5][0-9]"
_FRACTION = r"(\.[0-9]+)?"
_OFFSET = rf"[+-]{_HOUR}:{_MINUTE}"
# A leap second ends a day of UTC. Other offsets would add 1,440 pairs of a time of day and an offset.
_LEAP_SECOND = rf"23:59:60{_FRACTION}([Zz]|[+-]00:00)"
_TIME = rf"({_HOUR}:{_MINUTE}:{_MINUTE}{_FRACTION}([Zz]|{_OFFSET})|{_LEAP_SECOND})"
_DURATION_TIME = r"T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DURATION_DATE = r"([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"

_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_GROUP = r"[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [rf"({_GROUP}:){{7}}{_GROUP}", rf"({_GROUP}:){{1,7}}:", rf":(:{_GROUP}){{1,7}}", "::"]
    + [rf"({_GROUP}:){{1,{7 - n}}}(:{_GROUP}){{1,{n}}}" for n in range(1, 7)]
    # addresses whose last two groups are written as an IPv4 address
    + [rf"({_GROUP}:){{6}}{_IPV4}", rf"::({_GROUP}:){{0,5}}{_IPV4}"]
    + [rf"({_GROUP}:){{1,{5 - n}}}(:{_GROUP}){{1,{n}}}:{_IPV4}" for n in range(1, 5)]
    + [rf"({_GROUP}:){{1,5}}:{_IPV4}"]
)


def _compressed(before: int, most: int, ending: str = "") -> str:
    """A pattern of addresses with `before` groups before the "::", and up to `most` groups in all. If
    `ending` is given, a colon ends each group after the "::"."""
    head = rf"{_GROUP}(:{_GROUP}){{{before - 1}}}" if before else ""
    after = most - before
    if not after:
        return f"{head}::"
    if ending:
        return rf"{head}::({_GROUP}:){{0,{after}}}"
    return rf"{head}::({_GROUP}(:{_GROUP}){{0,{after - 1}}})?"


# No label has hyphens as its third and fourth characters, since these mark encoded international names. A
# name may have 253 characters; grammars write three labels of up to 63 characters, then 30 more characters.
_LETTER = "a-zA-Z0-9"


def _label(most: int) -> str:
    return (
        rf"([{_LETTER}]([{_LETTER}]|[{_LETTER}-][{_LETTER}])?"
        rf"|[{_LETTER}][{_LETTER}-]([{_LETTER}][{_LETTER}-]|-[{_LETTER}])"
        rf"[{_LETTER}-]{{0,{most - 5}}}[{_LETTER}]"
        rf"|[{_LETTER}][{_LETTER}-][{_LETTER}-][{_LETTER}])"
    )


_ALNUM = rf"[{_LETTER}]"
_REST_OF_NAME = rf"(\.{_ALNUM}({_ALNUM}|[.-]{_ALNUM}){{0,29}})?"
_HOSTNAME = rf"{_label(63)}(\.{_label(63)}(\.{_label(63)}{_REST_OF_NAME})?)?"
# Letters of the most frequent scripts, without those that IDNA maps to others.
_WORD = (
    r"a-z0-9\u00df-\u00f6\u00f8-\u00ff\u03b1-\u03c9\u0430-\u044f\u0450-\u045f\u05d0-\u05ea\u0627-\u063a"
    r"\u0641-\u064a\u0905-\u0939\u0e01-\u0e2e\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
)
_INTERNATIONAL_LABEL = rf"([{_WORD}]([{_WORD}-]?[{_WORD}]){{0,9}})"
_INTERNATIONAL_HOSTNAME = rf"{_INTERNATIONAL_LABEL}(\.{_INTERNATIONAL_LABEL}){{0,3}}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_INTERNATIONAL_ATOM = r"([a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]|[\u0080-\u{10ffff}])+"
_QUOTED = r'"([ !#-\[\]-~]|\\[ -~])*"'
_INTERNATIONAL_QUOTED = r'"([ !#-\[\]-~\u0080-\u{10ffff}]|\\[ -~])*"'
# RFC 5321, section 4.1.3: "::" stands for two groups or more.
_MAIL_IPV6 = "|".join(
    [rf"({_GROUP}:){{7}}{_GROUP}", rf"({_GROUP}:){{6}}{_IPV4}"]
    + [_compressed(n, 6) for n in range(7)]
    + [rf"{_compressed(n, 4, ending=':')}{_IPV4}" for n in range(5)]
)
_ADDRESS = rf"\[({_IPV4}|IPv6:({_MAIL_IPV6}))\]"

_ENCODED = r"%[0-9a-fA-F]{2}"
_SCHEME = r"[a-zA-Z][a-zA-Z0-9+.-]*:"
_FUTURE_IP = r"[vV][0-9a-fA-F]+\.[a-zA-Z0-9._~!$&'()*+,;=:-]+"
# RFC 3987: the characters that an IRI may have and a URI may not
_BEYOND = (
    r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    + "".join(rf"\u{{{plane:x}0000}}-\u{{{plane:x}fffd}}" for plane in range(1, 14))
    + r"\u{e1000}-\u{efffd}"
)
_PRIVATE = r"\ue000-\uf8ff\u{f0000}-\u{ffffd}\u{100000}-\u{10fffd}"


def _uri(beyond: str, private: str, *, relative: bool) -> str:
    """The pattern of URIs (RFC 3986), or of IRIs (RFC 3987) if `beyond` and `private` have the characters
    that RFC 3987 adds."""
    safe = rf"a-zA-Z0-9._~!$&'()*+,;=\-{beyond}"
    pchar = rf"([{safe}:@]|{_ENCODED})"
    host = rf"([{safe}]|{_ENCODED})*"
    authority = rf"(([{safe}:]|{_ENCODED})*@)?({host}|\[({_IPV6}|{_FUTURE_IP})\])(:[0-9]*)?"
    after = rf"(\?([{safe}:@/?{private}]|{_ENCODED})*)?(#([{safe}:@/?]|{_ENCODED})*)?"
    segments = rf"(/{pchar}*)*"
    whole = rf"{_SCHEME}(//{authority}{segments}|/({pchar}+{segments})?|{pchar}+{segments}|){after}"
    if not relative:
        return whole
    first = rf"([{safe}@]|{_ENCODED})+"
    return rf"({whole}|(//{authority}{segments}|/({pchar}+{segments})?|{first}{segments}|){after})"


def _regular_expression() -> str:
    """A pattern of regular expressions that are valid in all common dialects, with groups nested up to three
    deep."""
    escape = r"\\([dDwWsStnrfv^$.|?*+()\[\]{}/\\-]|x[0-9a-fA-F]{2}|u[0-9a-cA-C][0-9a-fA-F]{3})"
    ranges = "|".join(
        rf"{chr(low)}-[{chr(low)}-{last}]"
        for first, last in ("09", "az", "AZ")
        for low in range(ord(first), ord(last) + 1)
    )
    member = rf"([^\\\[\]^&~|\x00-\x1f-]|{escape}|{ranges})"
    count = r"\{([0-9]|[1-9][0-9]{1,2}|[01],[1-9][0-9]{0,2}|([0-9]|[1-9][0-9]),)\}"
    atom = rf"([^\\^$.|?*+()\[\]{{}}\x00-\x1f]|\.|{escape}|\[\^?{member}+-?\])"
    body = ""
    for _ in range(4):
        nested = rf"|\((\?:)?{body}\)" if body else ""
        piece = rf"(({atom}{nested})(([*+?]|{count})\??)?|[$^])"
        body = rf"{piece}*(\|{piece}*)*"
    return body


_VARIABLE = rf"([a-zA-Z0-9_]|{_ENCODED})(\.?([a-zA-Z0-9_]|{_ENCODED}))*(:[1-9][0-9]{{0,3}}|\*)?"
_LITERAL = rf"([!#$&()*+,./0-9:;=?@A-Z\[\]_a-z~{_BEYOND}{_PRIVATE}-]|{_ENCODED})"
_BASE64 = "[A-Za-z0-9+/]"

_PATTERNS: dict[str, str] = {
    # RFC 3339, section 5.6 and, for durations, appendix A
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": rf"P([0-9]+W|{_DURATION_DATE}({_DURATION_TIME})?|{_DURATION_TIME})",
    # RFC 5321, section 4.1.2; RFC 6531
    "email": rf"({_ATOM}(\.{_ATOM})*|{_QUOTED})@({_HOSTNAME}|{_ADDRESS})",
    "idn-email": rf"({_INTERNATIONAL_ATOM}(\.{_INTERNATIONAL_ATOM})*|{_INTERNATIONAL_QUOTED})@"
    rf"({_INTERNATIONAL_HOSTNAME}|{_ADDRESS})",
    # RFC 1123, section 2.1; RFC 5890, section 2.3.2.3, without contextual rules
    "hostname": _HOSTNAME,
    "idn-hostname": _INTERNATIONAL_HOSTNAME,
    # RFC 2673, section 3.2, and RFC 4291, section 2.2
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    # RFC 3986 and RFC 3987
    "uri": _uri("", "", relative=False),
    "uri-reference": _uri("", "", relative=True),
    "iri": _uri(_BEYOND, _PRIVATE, relative=False),
    "iri-reference": _uri(_BEYOND, _PRIVATE, relative=True),
    # RFC 6570
    "uri-template": rf"({_LITERAL}|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*",
    # RFC 9562
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    # RFC 6901, and draft-bhutton-relative-json-pointer
    "json-pointer": r"(/([^~/]|~[01])*)*",
    "relative-json-pointer": r"(0|[1-9][0-9]*)([+-](0|[1-9][0-9]*))?(#|(/([^~/]|~[01])*)*)",
    "regex": _regular_expression(),
    # RFC 4648, section 4; OpenAPI
    "byte": rf"({_BASE64}{{4}})*({_BASE64}{{2}}==|{_BASE64}{{3}}=)?",
}


_SAFE = r"a-zA-Z0-9._~!$&'()*+,;=@\-"
_REST = rf"(\?([{_SAFE}:/?]|{_ENCODED})*)?(#([{_SAFE}:/?]|{_ENCODED})*)?"
_PATH = rf"([{_SAFE}:/]|{_ENCODED})*"
_HOST_PATH = rf"//[a-zA-Z0-9.-]+(:[0-9]*)?(/{_PATH})?"
_SHORT_NAME = rf"[{_LETTER}](-?[{_LETTER}]){{0,9}}(\.[{_LETTER}](-?[{_LETTER}]){{0,9}})*"
_SHORT: dict[str, str] = {
    "email": rf"{_ATOM}(\.{_ATOM})*@{_SHORT_NAME}",
    "hostname": _SHORT_NAME,
    "uri": rf"{_SCHEME}({_HOST_PATH}|/?[{_SAFE}:]{_PATH}){_REST}",
    "uri-reference": rf"(({_SCHEME})?{_HOST_PATH}|/([{_SAFE}:]{_PATH})?|[{_SAFE}]+(/{_PATH})?|){_REST}",
}
_SHORT["iri"], _SHORT["iri-reference"] = _SHORT["uri"], _SHORT["uri-reference"]

_ANY_HOSTNAME = rf"{_label(63)}(\.{_label(63)})*"
_ANY_WORD = r"[a-zA-Z0-9\u00a1-\u{10ffff}]"
_ANY_LABEL = rf"{_ANY_WORD}([a-zA-Z0-9\u00a1-\u{{10ffff}}-]{{0,61}}{_ANY_WORD})?"
_ANY_TIME = rf"({_TIME}|{_HOUR}:{_MINUTE}:60{_FRACTION}{_OFFSET})"
_WHOLE: dict[str, str] = {
    "time": _ANY_TIME,
    "date-time": rf"{_DATE}[Tt]{_ANY_TIME}",
    "email": rf"({_ATOM}(\.{_ATOM})*|{_QUOTED})@({_ANY_HOSTNAME}|{_ADDRESS})",
    "idn-email": rf"({_INTERNATIONAL_ATOM}(\.{_INTERNATIONAL_ATOM})*|{_INTERNATIONAL_QUOTED})@"
    rf"({_ANY_LABEL}(\.{_ANY_LABEL})*|{_ADDRESS})",
    "hostname": _ANY_HOSTNAME,
    "idn-hostname": rf"{_ANY_LABEL}(\.{_ANY_LABEL})*",
    "regex": r"[\s\S]*",
}


def beyond_patterns(name: str, text: str) -> bool:
    """Whether `text` is of the format `name`. `text` must match the pattern `StringFormat.whole`, which may
    allow too much."""
    match name:
        case "regex":
            return is_regex(text)
        case "hostname":
            return len(text) <= MAX_HOSTNAME
        case "time" | "date-time":
            return _ends_a_day(text.upper().rpartition("T")[2])
    return True


MAX_HOSTNAME = 253


def _ends_a_day(time: str) -> bool:
    """Whether `time` is not a leap second, or is one at the end of a day of UTC."""
    if time[6:8] != "60" or time.endswith("Z"):
        return True
    sign = 1 if time[-6] == "+" else -1
    offset = int(time[-5:-3]) * 60 + int(time[-2:])
    return (int(time[:2]) * 60 + int(time[3:5]) - sign * offset) % 1440 == 1439


class StringFormat(NamedTuple):
    """A format of strings, as three patterns with anchors."""

    whole: str
    """All strings of the format; for some formats a superset (`beyond_patterns`)."""
    written: str
    """The common strings of the format; grammars write only these."""
    counted: str
    """A pattern with fewer states, for strings whose characters are counted. Its matches of up to 250
    characters are of the format. Empty if there is no such pattern."""


class NumberFormat(NamedTuple):
    """A format of numbers: the numbers from `low` to `high`, both included."""

    low: Decimal
    high: Decimal


_RANGES: dict[str, NumberFormat] = {}
for _bits in (8, 16, 32, 64):  # the registry of formats of OpenAPI
    _RANGES[f"int{_bits}"] = NumberFormat(Decimal(-(2 ** (_bits - 1))), Decimal(2 ** (_bits - 1) - 1))
    _RANGES[f"uint{_bits}"] = NumberFormat(Decimal(0), Decimal(2**_bits - 1))


def meaning(name: str, pointer: str) -> StringFormat | NumberFormat | None:
    """The strings or numbers of the format `name`; None for a format that restricts nothing.

    `pointer` is the pointer of the keyword. Raises `Unenforceable` for a misspelt name, such as "datetime".
    """
    if name in _PATTERNS:
        written = _PATTERNS[name]
        counted = f"^({_SHORT[name]})$" if name in _SHORT else ""
        return StringFormat(f"^({_WHOLE.get(name, written)})$", f"^({written})$", counted)
    if name in _RANGES:
        return _RANGES[name]
    correct = _SPELLINGS.get(_letters(name))
    if correct is not None:
        refuse(pointer, f"There is no format {name!r}", f"Write {correct!r}.")
    return None


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


FORMATS = (*_PATTERNS, *_RANGES)
"""The names of the formats that are enforced."""

_SPELLINGS = {_letters(name): name for name in FORMATS}
