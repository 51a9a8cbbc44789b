"""Addresses and command lines as they may be shown: without the credentials in them.

http://me:secret@host/v1                          http://host/v1
https://host/models?api_key=sk-abc                https://host/models?api_key=…
ramify run a.py --endpoint-key sk-abc token=abc   ramify run a.py --endpoint-key '…' token='…'
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping

SECRET = re.compile(r"key(?!word)|token(?!iz)|secret|passw|credential|authoriz|cookie", re.IGNORECASE)
"""Pattern of parts of names. In records and in queries of URLs, a value is hidden if its name contains a
match."""
LOGIN = re.compile(
    r"""(?<=://)(?:[^/?#\s"'{]+|[^/?#\s"'{:[]*:(?!\d+[/?#])[^\s"'{]+)(?=@)""",
)
"""Name and password in a URL. The second alternative is a password with a / that should be %2F."""
IN_QUERY = re.compile(
    rf"""(?P<before>[?&][\w-]{{0,40}}(?:{SECRET.pattern})[\w-]{{0,40}}=)(?P<text>[^\s&"'{{]+)""", re.I
)
_SECRET_OPTION = re.compile(r"([-_]key|apikey|token|secret|password)$", re.IGNORECASE)
"""Pattern of the names of flags and of program arguments whose values are hidden: not --key, a column, nor
--max-tokens."""


KEY_VARIABLE = "RAMIFY_ENDPOINT_KEY"
"""Variable of the environment with the API key of a server, for clients that are given none. Other users of
the machine can read command lines, and not the environment."""


def endpoint_key(given: str | None) -> str | None:
    """The API key of a server: `given`, or that of the environment; None if there is none."""
    return given or os.environ.get(KEY_VARIABLE)


def is_secret(name: str) -> bool:
    """Whether the values of the flag or argument `name` are hidden where a command line is shown."""
    return _SECRET_OPTION.search(name) is not None


def without_credentials(text: str) -> str:
    """`text` without the logins in its URLs, and with "…" for the credentials in their queries."""
    text = re.sub(f"{LOGIN.pattern}@", "", text)
    return IN_QUERY.sub(lambda found: f"{found['before']}…", text)


def command_line(words: Iterable[str], given: Mapping[str, object]) -> str:
    """The command that consists of `words`, quoted for a shell, with "…" for credentials.

    given: the parsed flags by name, from which a key is known however its flag was abbreviated
    """
    keys = {value for name, value in given.items() if isinstance(value, str) and is_secret(name)}

    def shown(word: str) -> str:
        name, equals, value = word.partition("=")
        if word in keys:
            return "'…'"
        if equals and (value in keys or is_secret(name)):
            return f"{shlex.quote(name)}='…'"
        return shlex.quote(without_credentials(word))

    return " ".join(map(shown, words))
