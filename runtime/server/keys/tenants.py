"""The keys of a server, what each has in flight, and the form that its requests have in the engine.

With a file of keys, the names of a key are its own in the engine: the request r1, the program p and the cache
scope s of the key alice are alice/r1, alice/p and @alice/s there. So a client can name nothing of another
key's.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import logging
import math
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from ramify.errors import InvalidRequest, Overloaded, RamifyError
from ramify.messages import Generate, TextChunk
from ramify.priority import BATCH, MOST
from ramify.runtime.config import ServerConfig
from ramify.runtime.server.keys.file import OWN, Key, hash_of, read_keys
from ramify.runtime.server.keys.limits import Bucket

logger = logging.getLogger("ramify.server")

ACCOUNT = "ramify.account"
"""Key in the ASGI scope of requests that the server makes itself: the account for which it does."""
DEFAULT = "default"
"""Name of the key of ``--api-key``."""
CHARACTERS_PER_TOKEN = 4
"""Characters of a prompt that count as a token until it is tokenised."""
OUTPUT_ESTIMATE = 256
"""Tokens that an output counts for until its end, if it may be that long."""
BUSY_S = 1.0
"""Seconds after which a request is to be sent again that found its key's places taken."""


class NotAllowed(RamifyError):
    """The error 403: the key may not do this."""

    code = "not_allowed"
    status = 403


class Account:
    """A key, and what it has in flight. It outlives a change of its key in the file.

    prefix : beginning of the key's ids in the engine; "" on a server without a file of keys
    owner : the name under which batch files are kept; "" without keys
    """

    def __init__(self, key: Key, prefix: str, owner: str, clock: Callable[[], float]) -> None:
        self.prefix = prefix
        self.owner = owner
        self.running = 0
        """HTTP requests in flight that generate."""
        self.rids: set[str] = set()
        """Ids in the engine of the generations in flight."""
        self._clock = clock
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.change(key)

    def change(self, key: Key) -> None:
        """Take the settings of `key`. A limit that stays keeps what was used of it."""
        self.key = key
        self.requests = self._bucket(self.requests, key.requests_per_minute)
        self.tokens = self._bucket(self.tokens, key.tokens_per_minute)

    def _bucket(self, old: Bucket | None, limit: int | None) -> Bucket | None:
        if old is not None:
            return old.renewed(limit)
        return None if limit is None else Bucket(limit, self._clock)

    def headers(self, *, anthropic: bool) -> list[tuple[bytes, bytes]]:
        """The response headers about the limits, in OpenAI's or in Anthropic's words."""
        found: list[tuple[str, str]] = []
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is None:
                continue
            left = max(0, math.floor(bucket.left))
            if anthropic:
                full = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=bucket.full_s)
                values = (str(bucket.limit), str(left), full.strftime("%Y-%m-%dT%H:%M:%SZ"))
                names = [f"anthropic-ratelimit-{name}-{what}" for what in ("limit", "remaining", "reset")]
            else:
                values = (str(bucket.limit), str(left), f"{bucket.full_s:.3f}s")
                names = [f"x-ratelimit-{what}-{name}" for what in ("limit", "remaining", "reset")]
            found += zip(names, values, strict=True)
        return [(name.encode(), value.encode()) for name, value in found]


class Caller:
    """The key of one HTTP request, and what it has taken of the key's limits."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._begun = False

    @property
    def key(self) -> Key:
        return self.account.key

    @property
    def name(self) -> str:
        """The key's name; "" on a server without keys."""
        return self.key.name

    # --- names ------------------------------------------------------------------------------------

    def own_id(self, identity: str) -> str:
        """The engine's id for the id of a request, a program or a store that the client names."""
        return self.account.prefix + identity

    def own_scope(self, scope: str) -> str:
        """The engine's cache scope for `scope`, which the client names, or "".

        "@alice/…" is of the key alice alone, "team/…" of all keys with ``scope = "team"``.
        """
        if not self.account.prefix:
            return scope
        return f"@{self.name}/{scope}" if self.key.scope == OWN else f"{self.key.scope}/{scope}"

    # --- what it may do ---------------------------------------------------------------------------

    def check_path(self, path: str, *, any_key: bool) -> None:
        """Raise `NotAllowed` unless the key may use `path`, which is for operators or for `any_key`."""
        key = self.key
        if key.endpoints and not _matches(path, key.endpoints):
            told = f"It may use {', '.join(key.endpoints)}."
            raise NotAllowed(f"The key {key.name!r} may not use {path[:100]}.", remedy=told)
        if not any_key and not key.admin and path not in key.endpoints:
            told = "Use a key with admin = true, or name the path in the key's endpoints."
            raise NotAllowed(f"The key {key.name!r} may not use {path[:100]}.", remedy=told)

    def may_use(self, model: str) -> bool:
        return _matches(model, self.key.models)

    def check_model(self, names: Iterable[str]) -> None:
        """Raise `NotAllowed` unless the key may use a model that has these `names`."""
        named = list(names)
        if not any(map(self.may_use, named)):
            raise NotAllowed(
                f"The key {self.name!r} may not use the model {named[0][:100]!r}.",
                field="model",
                remedy=f"It may use {', '.join(self.key.models) or 'none'}.",
            )

    def check_operator(self, act: str) -> None:
        """Raise `NotAllowed` unless the key is an operator's, who alone may do `act`."""
        if not self.key.admin:
            raise NotAllowed(f"The key {self.name!r} may not {act}.", remedy="Use a key with admin = true.")

    def pinned_share(self, of_all: float) -> float:
        """Share of the KV pages that the key's pins may hold, where all pins together may hold `of_all`."""
        if not self.account.prefix:
            return 1.0
        own = self.key.max_pinned_share
        return of_all / 2 if own is None else own

    def _priority(self, asked: int, batch: bool) -> int:
        key = self.key
        if not asked:
            return min(BATCH, key.priority) if batch else key.priority
        if asked > key.effective_max_priority:
            raise NotAllowed(
                f"The key {key.name!r} may not have the priority {asked}.",
                field="priority",
                remedy=f"It may have at most {key.effective_max_priority}.",
            )
        return asked

    def owned(self, request: Generate, batch: str) -> Generate:
        """`request` with the names, the priority and the key that it has in the engine.

        batch : the id of its batch; "" for none. Raises `NotAllowed` for a priority that is too high.
        """
        hint = request.hint
        if hint is not None and self.account.prefix:
            hint = msgspec.structs.replace(hint, program=self.own_id(hint.program))
        return msgspec.structs.replace(
            request,
            rid=self.own_id(request.rid),
            hint=hint,
            scope=self.own_scope(request.scope),
            flow=batch or request.flow,
            priority=self._priority(request.priority, bool(batch)),
            key=self.name if self.account.prefix else "",
        )

    def shown(self, chunk: TextChunk, rid: str) -> TextChunk:
        """`chunk` as the client is to see it: with its own `rid`, and without the names of other keys'
        programs."""
        prefix, usage = self.account.prefix, chunk.usage
        if not prefix:
            return chunk
        if usage is not None and usage.evicted_by:
            by = usage.evicted_by
            if f" {prefix}" in f" {by}":
                by = by.replace(prefix, "", 1)
            elif "/" in by:  # the id of another key's program or request
                by = "another key"
            usage = msgspec.structs.replace(usage, evicted_by=by)
        return msgspec.structs.replace(chunk, rid=rid, usage=usage)

    # --- limits -----------------------------------------------------------------------------------

    def begin(self, request: Generate | None) -> int:
        """Count a generation: with the first one the HTTP request, and the tokens that `request` is expected
        to take. Returns these tokens, for `settle`. Raises `Overloaded` if a limit is reached; its field
        names the limit. None counts a HTTP request that stores without generating."""
        account, key = self.account, self.key
        tokens = 0 if account.tokens is None or request is None else expected_tokens(request)
        if not self._begun:
            most = key.concurrent_requests
            if most is not None and account.running >= most:
                self._refuse("concurrent_requests", f"{account.running} requests run", most, BUSY_S)
            if account.requests is not None and (wait := account.requests.wait_s(1)):
                self._refuse("requests_per_minute", "no request is left", account.requests.limit, wait)
        if account.tokens is not None and request is not None:
            if wait := account.tokens.wait_s(tokens):
                left = max(0, math.floor(account.tokens.left))
                told = f"the request counts as {tokens} tokens, and {left} are left"
                self._refuse("tokens_per_minute", told, account.tokens.limit, wait)
            account.tokens.take(tokens)
        if not self._begun:
            self._begun = True
            account.running += 1
            if account.requests is not None:
                account.requests.take(1)
        return tokens

    @property
    def begun(self) -> bool:
        """Whether the HTTP request has been counted."""
        return self._begun

    def settle(self, expected: int, spent: int) -> None:
        """Replace the tokens that `begin` has counted by those that were `spent`."""
        if self.account.tokens is not None:
            self.account.tokens.take(spent - expected)

    def end(self) -> None:
        """End the HTTP request."""
        if self._begun:
            self._begun = False
            self.account.running -= 1

    def _refuse(self, limit: str, why: str, most: int, wait_s: float) -> None:
        raise Overloaded(
            f"The key {self.name!r} has reached {limit}, {most}: {why}.",
            field=limit,
            remedy=f"Send it again in {wait_s:.1f} s.",
            retry_after=wait_s,
        )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether `name` matches one of `patterns`, in which * stands for any characters."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def expected_tokens(request: Generate) -> int:
    """The tokens that `request` counts for until it ends: those of its prompt by `expected_prompt`, and the
    output, of which at most `OUTPUT_ESTIMATE` tokens count."""
    most = request.sampling.max_tokens
    return expected_prompt(request) + (OUTPUT_ESTIMATE if most is None else min(most, OUTPUT_ESTIMATE))


def expected_prompt(request: Generate) -> int:
    """The tokens that a prompt counts for until it is tokenised: a quarter of its characters, and its token
    ids."""
    characters = len(request.tools) + sum(len(turn.content) for turn in request.chat or ())
    ids = 0
    for segment in request.prompt:
        if isinstance(segment, str):
            characters += len(segment)
        else:
            ids += len(segment)
    return math.ceil(characters / CHARACTERS_PER_TOKEN) + ids


OPEN = Account(Key(name="", hash="", max_priority=MOST, admin=True), "", "", time.monotonic)
"""The account of everybody, on a server without keys."""


class Keys:
    """The keys of a server: those of ``--keys``, and that of ``--api-key``, which has no limits.

    Raises `InvalidRequest` for a wrong file.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = None if config.keys is None else Path(config.keys).expanduser()
        self._default = None
        self._default_owner = ""
        if config.api_key is not None:
            self._default_owner = hashlib.blake2b(config.api_key.encode(), digest_size=16).hexdigest()
            self._default = Key(
                name=DEFAULT,
                hash=hash_of(config.api_key),
                admin=True,
                max_priority=MOST,
                max_pinned_share=1.0,
            )
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._load()

    def __bool__(self) -> bool:
        """Whether requests need a key."""
        return bool(self._accounts)

    def named(self, name: str) -> Account | None:
        return self._accounts.get(name)

    def of_id(self, identity: str) -> str:
        """Name of the key that an id in the engine belongs to; "" without a file of keys."""
        return "" if self.path is None else identity.partition("/")[0]

    def owner(self, owner: str) -> Account | None:
        """The account whose batch files have this `owner`; `OPEN` without keys."""
        accounts = self._accounts.values() if self else (OPEN,)
        return next((one for one in accounts if one.owner == owner), None)

    def find(self, given: Iterable[bytes]) -> Account | None:
        """The account of the first of the keys in `given` that is known. Compares with all hashes, each in
        constant time."""
        found = None
        for secret in given:
            digest = "sha256:" + hashlib.sha256(secret).hexdigest()
            for account in self._accounts.values():
                if hmac.compare_digest(account.key.hash, digest):
                    found = found or account
        return found

    def reload(self) -> None:
        """Read the file again. The keys stay if it is wrong, and if there is none; a line in the log says
        so."""
        if self.path is None:
            logger.warning("SIGHUP is ignored: only a file of keys (--keys) is read again while serving.")
            return
        try:
            self._load()
        except InvalidRequest as error:
            logger.error("The keys stay as they are: %s", error)
        else:
            logger.warning("The keys were read again: %d.", len(self._accounts))

    def _load(self) -> None:
        keys = {} if self.path is None else read_keys(self.path)
        if self._default is not None:
            if DEFAULT in keys:
                raise InvalidRequest(f"{self.path}: keys.{DEFAULT} is the key of --api-key; name it anew.")
            keys[DEFAULT] = self._default
        accounts = {}
        for name, key in keys.items():
            if (account := self._accounts.get(name)) is not None:
                account.change(key)
            else:
                prefix = "" if self.path is None else f"{name}/"
                owner = self._default_owner if key is self._default else f"key:{name}"
                account = Account(key, prefix, owner, self._clock)
            accounts[name] = account
        self._accounts = accounts
