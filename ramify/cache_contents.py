"""The contents of an engine's prefix cache, as GET /cache and `Engine.cache` tell them."""

from __future__ import annotations

from typing import Literal

import msgspec


class Hold(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The prefixes that one owner holds by leases."""

    owner: str
    """Id of the program, the session or the pin; that of the request for a request that was retracted."""
    kind: Literal["pin", "program", "session", "retracted"]
    """A pin's pages are not evicted before it is over; those of the others go after all pages without a
    lease."""
    name: str
    """Name of the program, or of the client for a session."""
    client: str
    """Client that sent the request, by its headers; empty in `Engine.cache`."""
    key: str = ""
    """Name of the API key with which the request came; empty without keys."""
    scope: str
    """First 8 hexadecimal digits of the SHA-256 of the cache scope; empty for no scope."""
    prefixes: int
    """Number of prefixes, each with a lease of its own."""
    tokens: int
    """Distinct tokens of the prefixes."""
    pages: int
    """KV pages of these tokens. Owners that hold a common prefix hold its pages together. A prefix
    that leaves others in the middle of a page has that page twice."""
    seconds_left: float
    """Seconds until the last of the leases is over."""
    needed_in: float | None
    """Seconds until the owner is expected to need a prefix; None if that is unknown."""
    replica: str = ""
    """The replica with the pages; empty in an engine with one."""
    ids: tuple[int, ...] = ()
    """The last tokens of the longest prefix, in answers that show texts."""
    text: str = ""
    """Text of `ids`."""


class Unheld(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prefix that nobody holds and no running request uses to its end. Fields are as in `Hold`."""

    scope: str
    tokens: int
    pages: int
    """KV pages of the prefix that can be evicted, as neither a lease nor a request needs them."""
    replica: str = ""
    ids: tuple[int, ...] = ()
    text: str = ""


class CacheContents(msgspec.Struct, frozen=True, kw_only=True):
    """The owners that hold prefixes, pins first, then those whose leases last longest; and the longest
    prefixes that nobody holds."""

    page_size: int
    """Tokens of a KV page."""
    page_bytes: int
    """Bytes of a KV page, in the memory of all ranks together."""
    pages_total: int
    pages_free: int
    pages_evictable: int
    pages_leased: int
    pages_in_use: int
    """Pages: free + evictable + leased + in_use == total."""
    pages_pinned: int
    """Leased pages, and pages in use, that a pin holds."""
    pages_pinnable: int
    """Most pages that pins may hold together (`max_pinned_share`)."""
    holds: tuple[Hold, ...]
    more_holds: int
    """Number of leases that `holds` leaves out."""
    unheld: tuple[Unheld, ...]
