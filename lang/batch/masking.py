"""Masking of the credentials in the texts of a batch's record, by checksums.

api_key = "hunter2"; headers = {"Cookie": "id=7"}   a text whose name matches `SECRET`
"Bearer abcd", "sk-abcdefgh"                        a text that begins like a key
"postgres://me:abc@host", "http://host/?key=abc"    a part of an address
"wJalrXUtnFEMI7MDENG9"                              20 or more letters and digits without a space
"""

from __future__ import annotations

import hashlib
import re

from ramify.credentials import IN_QUERY, LOGIN, SECRET

_NAMED = re.compile(
    rf"""(?P<before>(?:{SECRET.pattern})[\w-]{{0,40}}["'\])]{{0,3}}"""
    r"""\s{0,9}(?::[^=\n"']{0,90}=|[:=])\s{0,9}[a-z]{0,2})"""
    r"""(?P<quote>\"{3}|'{3}|["'])(?P<text>(?:(?!(?P=quote))[^\\\n]|\\.)+)""",
    re.IGNORECASE,
)
"""A name and its literal value, as in source code, JSON and repr(). Repetitions are bounded, so that matching
takes time linear in the length of the text."""

_KEY = re.compile(
    r"""(?<=\bBearer\ )[^\s"'\\{]{4,}
    | (?<=\bBasic\ )[\w+/-]{8,}=*
    | \bsk-[\w-]{8,}
    | (?<![A-Za-z0-9]) (?=[A-Za-z]*\d) (?=\d*[A-Za-z]) [A-Za-z0-9]{20,}""",
    re.VERBOSE,
)


def hidden(text: str) -> str:
    """Checksum of `text`, written as an identifier, so that source code in which the checksum replaces `text`
    still parses."""
    return f"hidden_{hashlib.blake2b(text.encode(errors='replace'), digest_size=6).hexdigest()}"


def masked(text: str) -> str:
    """`text` with its credentials masked, and the rest unchanged."""
    for pattern in (LOGIN, _KEY):
        text = pattern.sub(lambda found: hidden(found[0]), text)
    text = IN_QUERY.sub(lambda found: found["before"] + hidden(found["text"]), text)
    return _NAMED.sub(lambda found: found["before"] + found["quote"] + hidden(found["text"]), text)
