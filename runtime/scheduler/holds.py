"""Holds in the prefix cache: leases and pins by owner, and the cap of pins."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Literal

from ramify.cache_contents import CacheContents, Hold, Unheld
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ProgramHint
from ramify.radix.cache import NaiveCache, PrefixCache
from ramify.radix.lease import Lease
from ramify.runtime.scheduler.requests.request import Request

LEASES_A_HOLD = 8
"""The answer to a question for n holds looks at 8n leases: a program has one for each live branch."""
SHOWN_IDS = 40
"""Tokens of a prefix that are shown, its last ones."""


def pinnable(cache: PrefixCache, share: float) -> int:
    """Most pages that pins may hold together, where they may hold `share` of all."""
    return 0 if isinstance(cache, NaiveCache) else int(share * cache.num_pages)


def check_pin(cache: PrefixCache, request: Request, open_requests: Iterable[Request], share: float) -> None:
    """Raise `InvalidRequest` if the pages of the pin `request` and those of the pins before it are more than
    `pinnable`, or those of its key more than the key's share; `open_requests` has the pins that are not held
    yet."""
    if isinstance(cache, NaiveCache):
        raise UnsupportedField("prefix_cache is 'naive', which keeps nothing.", field="hint.pinned")
    size, hint = cache.page_size, request.hint
    pinned = cache.pinned_length(cache.match(request.ids, request.scope)) // size
    needed = -(-(request.prompt_len + request.max_tokens) // size) - pinned
    coming = [
        other
        for other in open_requests
        if other is not request and other.hint is not None and other.hint.pinned
    ]

    def check(whose: str, held: int, coming: list[Request], share: float, raised: str) -> None:
        held += sum(-(-(other.prompt_len + other.max_tokens) // size) for other in coming)
        most = pinnable(cache, share)
        if held + needed > most:
            raise InvalidRequest(
                f"The pin needs {needed} KV pages of {size} tokens; {whose} hold {held} of the {most} that"
                f" they may hold (max_pinned_share={share:g} of {cache.num_pages}).",
                field="hint.pinned",
                remedy=f"Release a pin, pin less, or give the {raised}.",
            )

    check("pins", cache.counts().pinned, coming, share, "engine a larger max_pinned_share or kv_memory_gb")
    if request.key and hint is not None:
        leases = [one for one in cache.leases() if one.pinned and one.owner.startswith(f"{request.key}/")]
        mine = [other for other in coming if other.key == request.key]
        whose = f"pins of the key {request.key!r}"
        check(whose, cache.extent(leases)[1], mine, hint.max_pinned_share, "key a larger max_pinned_share")


def contents(
    cache: PrefixCache, page_bytes: int, share: float, most: int, *, ids: bool, owners: str = ""
) -> CacheContents:
    """The contents of `cache`, with at most `most` holds and as many prefixes that nobody holds.

    ids : whether the last tokens of the prefixes are told
    owners : as in `GetCache`
    """
    counts = cache.counts()
    leases, now = [lease for lease in cache.leases() if lease.owner.startswith(owners)], cache.now()
    by_owner: dict[str, list[Lease]] = {}
    for lease in sorted(leases, key=lambda lease: (not lease.pinned, -lease.expires))[: most * LEASES_A_HOLD]:
        if lease.owner in by_owner or len(by_owner) < most:
            by_owner.setdefault(lease.owner, []).append(lease)
    shown = SHOWN_IDS if ids else 0
    return CacheContents(
        page_size=cache.page_size,
        page_bytes=page_bytes,
        pages_total=counts.total,
        pages_free=counts.free,
        pages_evictable=counts.evictable,
        pages_leased=counts.leased,
        pages_in_use=counts.in_use,
        pages_pinned=counts.pinned,
        pages_pinnable=pinnable(cache, share),
        holds=tuple(_hold(cache, owned, now, shown) for owned in by_owner.values()),
        more_holds=len(leases) - sum(map(len, by_owner.values())),
        unheld=tuple(
            Unheld(scope=_digest(one.scope), tokens=one.tokens, pages=one.pages, ids=one.ids)
            for one in ([] if owners else cache.unheld(most, shown))
        ),
    )


def _hold(cache: PrefixCache, leases: list[Lease], now: float, shown: int) -> Hold:
    """The hold of the owner of `leases`, one or more."""
    tokens, pages = cache.extent(leases)
    longest = max(leases, key=lambda lease: 0 if lease.node is None else lease.node.end)
    hint = longest.note if isinstance(longest.note, ProgramHint) else None
    needed = min(lease.needed for lease in leases) - now
    kind: Literal["pin", "program", "session", "retracted"]
    if any(lease.pinned for lease in leases):
        kind = "pin"
    else:
        kind = "retracted" if hint is None else "session" if hint.session else "program"
    found = cache.prefix(longest, shown)
    return Hold(
        owner=longest.owner,
        kind=kind,
        name="" if hint is None else hint.name,
        client="" if hint is None else hint.client,
        scope=_digest(found.scope),
        prefixes=len(leases),
        tokens=tokens,
        pages=pages,
        seconds_left=max(lease.expires for lease in leases) - now,
        needed_in=None if math.isinf(needed) else max(0.0, needed),
        ids=found.ids,
    )


def _digest(scope: str) -> str:
    return hashlib.sha256(scope.encode()).hexdigest()[:8] if scope else ""
