"""Protection against requests that web pages send through the browser of a user (docs/security.md).

Three checks refuse such requests: of Host, of Origin and Sec-Fetch-Site, and of the Content-Type of a body.
A form with a file (`UPLOADS`) needs a bearer token in place of the third: a page can make a browser send a
form without asking, but no such header.
Sources: RFC 9110 section 7.2, RFC 6454, W3C Fetch Metadata Request Headers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from ramify.errors import InvalidRequest, RamifyError
from ramify.runtime.config import ServerConfig
from ramify.runtime.host_names import host_name, ip_address, is_loopback, split_names
from ramify.runtime.server.errors import error_response

_JSON = re.compile(rb"\s*application/([\w.+-]+\+)?json\s*(;.*)?", re.IGNORECASE)
_FORM = re.compile(rb"\s*multipart/form-data\s*;.*", re.IGNORECASE | re.DOTALL)
UPLOADS = frozenset({"/v1/files"})
"""Paths that take a form with a file, by POST."""
_BODIES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_OWN_SITE = frozenset({b"", b"none", b"same-origin"})
"""Allowed values of Sec-Fetch-Site. They stand for, in this order: a client that is no browser, a navigation
by the user, and a page of this server."""


class HostNotAllowed(RamifyError):
    code = "host_not_allowed"
    status = 403


class OriginNotAllowed(RamifyError):
    code = "origin_not_allowed"
    status = 403


class UnsupportedMediaType(InvalidRequest):
    """The error 415 (RFC 9110, section 15.5.16)."""

    code = "unsupported_media_type"
    status = 415


class RefuseWebPages:
    """Middleware that answers 403 and 415 to requests of web pages, by the rules of this module."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app = app
        self._open = not config.needs_key
        self._hosts = _host_check(config)
        self._origins = frozenset(origin.encode() for origin in split_names(config.cors))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await error_response(error, scope)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RamifyError | None:
        hosts: list[bytes] = []
        origins: list[bytes] = []
        kinds: list[bytes] = []
        site = destination = b""
        body = bearer = False
        for name, value in scope["headers"]:
            match name:
                case b"host":
                    hosts.append(value)
                case b"origin":
                    origins.append(value)
                case b"sec-fetch-site":
                    site = value
                case b"sec-fetch-dest":
                    destination = value
                case b"content-type":
                    kinds.append(value)
                case b"authorization":
                    bearer = value[:7].lower() == b"bearer "
                case b"content-length":
                    body = body or value != b"0"
                case b"transfer-encoding":
                    body = True
        if self._hosts is not None and (len(hosts) != 1 or not self._hosts(hosts[0])):
            return _host_not_allowed(hosts)
        if self._open and (site not in _OWN_SITE or origins):
            # A link to the dashboard, whose HTML holds no data, may stand on any page.
            linked = scope["path"] == "/" and destination == b"document" and not origins
            if not linked and not self._is_allowed(hosts, origins, site):
                return _origin_not_allowed(origins)
        if scope["method"] in _BODIES and (body or kinds) and not _is_json(kinds):
            if scope["method"] == "POST" and scope["path"] in UPLOADS and _is_form(kinds):
                return None if bearer else _no_token()
            # LiteLLM sends bodies to Ollama's API without a type. Browsers add an origin to such a request.
            untyped = not kinds and not origins and not site and scope["path"].startswith("/api/")
            return None if untyped else _not_json(kinds)
        return None

    def _is_allowed(self, hosts: list[bytes], origins: list[bytes], site: bytes) -> bool:
        """Whether the request comes from a page of this server, or from an origin that ``cors`` names."""
        if b"*" in self._origins:
            return True
        if len(origins) != 1:
            return False
        origin = origins[0].lower()
        if origin in self._origins:
            return True
        return site in _OWN_SITE and [origin.partition(b"://")[2]] == [host.lower() for host in hosts]


def _host_check(config: ServerConfig) -> Callable[[bytes], bool] | None:
    """The check that a Host header must pass; None if every Host is allowed."""
    names = split_names(config.allowed_hosts)
    if "*" in names or (config.needs_key and not names):
        return None
    exact = {host_name(name) for name in names if not name.startswith("*.")}
    suffixes = tuple(f".{host_name(name[2:])}" for name in names if name.startswith("*."))
    local = not config.needs_key
    bound = config.host.lower()

    # Headers repeat. The cache is bounded, as clients choose what is in it.
    @functools.lru_cache(maxsize=256)
    def is_allowed(header: bytes) -> bool:
        host = host_name(header.decode("latin-1"))
        if host is None:
            return False
        if host in exact or host.endswith(suffixes):
            return True
        # DNS rebinding needs a name. If the server listens beyond loopback, any address may be its own.
        return local and (
            is_loopback(host) or host == bound or (ip_address(host) is not None and not is_loopback(bound))
        )

    return is_allowed


def _is_json(kinds: list[bytes]) -> bool:
    return len(kinds) == 1 and _JSON.fullmatch(kinds[0]) is not None


def _is_form(kinds: list[bytes]) -> bool:
    return len(kinds) == 1 and _FORM.fullmatch(kinds[0]) is not None


def _no_token() -> RamifyError:
    return UnsupportedMediaType(
        "A form needs an Authorization header, which tells it from the form of a web page.",
        remedy='Send "Authorization: Bearer KEY"; without --api-key any KEY will do.',
    )


def _host_not_allowed(hosts: list[bytes]) -> RamifyError:
    if len(hosts) != 1:
        return HostNotAllowed("The request must have one Host header.")
    name = hosts[0][:100].decode("latin-1")
    return HostNotAllowed(
        f"This server does not answer to the host {name!r}.",
        remedy="Start it with --allowed-hosts and that name, or with --api-key.",
    )


def _origin_not_allowed(origins: list[bytes]) -> RamifyError:
    if not origins:
        return OriginNotAllowed(
            "This server does not answer requests that pages of other sites make without an origin.",
            remedy="Start it with --cors and the page's origin, and let the page use fetch.",
        )
    return OriginNotAllowed(
        f"This server does not answer pages of {origins[0][:100].decode('latin-1')!r}.",
        remedy="Start it with --cors and that origin.",
    )


def _not_json(kinds: list[bytes]) -> RamifyError:
    given = repr(kinds[0][:100].decode("latin-1")) if kinds else "missing"
    files = " Files and images are not taken here." if _is_form(kinds) else ""
    return UnsupportedMediaType(
        f"The body must be JSON, and its content type is {given}.{files}",
        remedy="Send the header content-type: application/json.",
    )
