"""Host names and origins, as requests and the configuration write them."""

from __future__ import annotations

import ipaddress
import re

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d+)?")
"""An origin as browsers write it (RFC 6454, section 6.2)."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d*)?")


_TCP = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


def tcp_host(address: str) -> str | None:
    """The host in tcp://HOST:PORT, in lower case and without brackets; None if `address` has another form."""
    found = _TCP.fullmatch(address)
    return found[1].strip("[]").lower() if found and int(found[2]) < 65536 else None


def is_origin(text: str) -> bool:
    """True if `text` is an origin, in lower case and without a path."""
    return _ORIGIN.fullmatch(text) is not None


def split_names(names: str) -> tuple[str, ...]:
    """The entries of a comma-separated list, in lower case."""
    return tuple(name.strip().lower() for name in names.split(",") if name.strip())


def host_name(host: str) -> str | None:
    """The name or address in a Host header (RFC 9110, section 7.2), in lower case, without port, brackets and
    trailing dot. None if `host` is not a valid header."""
    found = _HOST.fullmatch(host.strip().lower())
    return found[1].strip("[]").removesuffix(".") if found else None


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """`host` as an IP address; None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """True if `host` is a loopback name or address. Only its text is examined: names are not resolved."""
    address = ip_address(host)
    if address is not None:
        return address.is_loopback
    return host == "localhost" or host.endswith(".localhost")
