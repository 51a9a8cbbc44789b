"""The words for a connection that fails: the address, the reason and the remedy.

http://127.0.0.1:9/v1 cannot be reached: 127.0.0.1:9 refuses connections. Start the server …
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ramify.credentials import without_credentials
from ramify.errors import InvalidRequest

NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
"""Reasons of OpenSSL if the other side answers in anything but TLS, such as in plain HTTP."""
TLS = "Name the file of its certificate authority in SSL_CERT_FILE."
NETWORK = "Correct the address, or see whether this machine has a network."
CLOSED = "See the log of the server; if it speaks TLS, write https://."
_KINDS = (ssl.SSLError, socket.gaierror, ConnectionError, TimeoutError)


def proxy_for(scheme: str, host: str) -> str | None:
    """URL of the proxy for `host`, from the environment or the system; None for no proxy.

    Raises `InvalidRequest`, with the name of the variable, for text that is not the URL of a proxy.
    """
    proxies = getproxies()
    found = proxies.get(scheme) or proxies.get("all")
    if not found or proxy_bypass(host):
        return None
    url = found if "://" in found else f"http://{found}"
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.hostname and parts.port != 0:
            return url
    raise InvalidRequest(
        f"{_variable(scheme)} is {without_credentials(url)!r}, which is not the URL of a proxy.",
        field=_variable(scheme),
        remedy=f"It is http://HOST:PORT, or name {host} in NO_PROXY.",
    )


def is_connection(error: BaseException) -> bool:
    """Whether `error`, or an error that caused it, is the failure of a connection."""
    return any(isinstance(cause, _KINDS) for cause in _causes(error))


def unreachable(url: str, error: BaseException, proxy: str | None = None) -> tuple[str, str]:
    """(message, remedy) for the connection to `url` that failed with `error`. `proxy` is the URL of the HTTP
    proxy to which it went."""
    reason, remedy = _reason(error, proxy or url)
    if proxy is not None and remedy != TLS:
        reason = f"the proxy {reason}"
        remedy = proxy_remedy(url)
    return f"{without_credentials(url)} cannot be reached: {reason}.", remedy


def proxy_remedy(url: str) -> str:
    """The remedy if the HTTP proxy for `url` is wrong, or refuses."""
    parts = urlsplit(url)
    return f"Correct {_variable(parts.scheme)}, or name {parts.hostname} in NO_PROXY."


def _variable(scheme: str) -> str:
    """Name of the variable from which the proxy for URLs with `scheme` comes."""
    return f"{scheme if getproxies().get(scheme) else 'all'}_proxy".upper()


def _reason(error: BaseException, url: str) -> tuple[str, str]:
    """(reason, remedy) for a connection to the host and port of `url`."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = parts.hostname or ""
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    causes = _causes(error)
    for cause in causes:  # aiohttp's errors derive from those of ssl without their fields
        match cause:
            case ssl.SSLCertVerificationError(verify_message=said):
                return f"certificate verify failed: {said}", TLS
            case ssl.SSLError(reason=said) if said in NO_TLS:
                return f"{place} does not speak TLS", "Write http:// in place of https://."
            case ssl.SSLError(reason=said):
                return f"the TLS handshake with {place} failed: {said}", "See the log of the server."
            case socket.gaierror():
                return f"{host} has no address: {cause.strerror}", NETWORK
            case ConnectionRefusedError():
                here = host in ("localhost", "::1") or host.startswith("127.")
                how = f" (`ramify serve --port {port}`)" if here else " there"
                return f"{place} refuses connections", f"Start the server{how}, or correct the address."
            case TimeoutError():
                remedy = "Correct the address, or see whether a firewall drops the packets."
                return f"{place} does not answer", remedy
    of_kind = [one for kind in (ConnectionError, OSError) for one in causes if isinstance(one, kind)]
    found = [*of_kind, causes[-1]][0]
    said = (found.strerror if isinstance(found, OSError) else None) or str(found) or type(found).__name__
    connected = isinstance(found, ConnectionError) or not isinstance(found, OSError)
    return said.splitlines()[0].rstrip("."), CLOSED if connected else NETWORK


def _causes(error: BaseException) -> list[BaseException]:
    """`error` and the errors before it, from the last to the first."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__  # httpcore hides the reason by `from None`
    return found
