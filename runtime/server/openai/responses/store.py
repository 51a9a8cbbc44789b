"""Stored responses and conversations of the Responses API, in memory.

A response keeps the items of its whole chain. Items are shared between the responses of a chain and counted
once::

    resp_1   user "Hi", assistant "Hello"                            2 items of its own
    resp_2   those, user "Who?", assistant "Me"                      previous_response_id: resp_1
    resp_1 is dropped: its items stay, as resp_2 has them

Above the bounds an entry of the key that holds most is dropped, the least recently used one: a key that
floods the store drops what is its own.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from ramify.errors import InvalidRequest, NotFound, UnsupportedField
from ramify.runtime.server.fields import MAX_OBJECTS, Fields
from ramify.runtime.server.leases import scoped
from ramify.runtime.server.openai.bodies import Body
from ramify.runtime.server.service import IN_BATCH, KEY

MAX_ENTRIES = 4096
"""Maximum number of stored responses and conversations."""
MAX_BYTES = 256 << 20
"""Maximum size of all stored items and bodies."""

NOT_STORED = "Send the whole conversation as input, or start the server without --no-store."

T = TypeVar("T", bound="Entry")


class PreviousResponseNotFound(InvalidRequest):
    code = "previous_response_not_found"


class ConversationLocked(InvalidRequest):
    code = "conversation_locked"


class Item(NamedTuple):
    id: str
    data: bytes
    """The item as JSON."""


@dataclass(eq=False, kw_only=True)
class Entry:
    """A stored response or conversation."""

    id: str
    scope: str
    """The cache scope. Requests of other scopes do not find the entry."""
    items: list[Item]
    """All items of the chain or the conversation, oldest first."""
    program: str = ""
    """Id in the engine of the program whose leases end with the last of its entries; empty if it has no
    leases."""
    owner: str = field(default_factory=lambda: KEY.get().name)
    """Name of the API key that stored the entry."""

    @property
    def own_bytes(self) -> int:
        """Bytes beside those of the items."""
        return 0


@dataclass(eq=False, kw_only=True)
class StoredResponse(Entry):
    body: bytes
    """The response as JSON."""
    outputs: int
    """Number of items at the end of `items` that the response itself has written."""

    @property
    def own_bytes(self) -> int:
        return len(self.body)


@dataclass(eq=False, kw_only=True)
class Conversation(Entry):
    created_at: int
    metadata: dict[str, str] = field(default_factory=dict)
    locked: bool = False
    """Whether a request runs that will append to it."""

    def body(self) -> Body:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }


class ResponseStore:
    """The stored responses and conversations by id, with bounds on their number and size."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: collections.OrderedDict[str, Entry] = collections.OrderedDict()
        """Least recently used first."""
        self._holders: collections.Counter[tuple[str, Item]] = collections.Counter()
        """(scope, item) → number of entries that have the item."""
        self._by_id: dict[tuple[str, str], Item] = {}
        self._programs: collections.Counter[str] = collections.Counter()
        """Program → number of its entries and of its running requests."""
        self.ended: dict[str, None] = {}
        """Programs whose last entry or running request has ended, and whose leases have not. A dict keeps
        their order."""
        self._entries_of: collections.Counter[str] = collections.Counter()
        """Key → number of its entries."""
        self._bytes_of: collections.Counter[str] = collections.Counter()
        """Key → size of its items and bodies. An item is of one key, as cache scopes of stores are."""

    @property
    def bytes(self) -> int:
        return self._bytes_of.total()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, kind: type[T], entry_id: str, scope: str) -> T | None:
        """The entry; None if there is none in this scope. Has no effect: a body may be parsed several times,
        see `use`."""
        entry = self._entries.get(entry_id)
        return entry if isinstance(entry, kind) and entry.scope == scope else None

    def use(self, entry: Entry) -> None:
        """Make `entry` the most recently used, unless it was removed."""
        if self._entries.get(entry.id) is entry:
            self._entries.move_to_end(entry.id)

    def find_item(self, item_id: str, scope: str) -> Item | None:
        return self._by_id.get((scope, item_id))

    def add(self, entry: Entry) -> None:
        self._entries[entry.id] = entry
        self._entries_of[entry.owner] += 1
        self._bytes_of[entry.owner] += entry.own_bytes
        self.hold_program(entry.program)
        self._hold(entry, entry.items)
        self._make_room()

    def append(self, conversation: Conversation, items: Sequence[Item]) -> None:
        """Append to a conversation. It may have been deleted meanwhile; then nothing is stored."""
        if self._entries.get(conversation.id) is conversation:
            conversation.items += items
            self._hold(conversation, items)
            self._make_room()

    def remove_item(self, conversation: Conversation, item_id: str) -> bool:
        """Remove an item from a conversation. Returns whether it was there."""
        removed = [item for item in conversation.items if item.id == item_id]
        conversation.items = [item for item in conversation.items if item.id != item_id]
        self._let_go(conversation, removed)
        return bool(removed)

    def remove(self, entry: Entry) -> None:
        del self._entries[entry.id]
        self._entries_of[entry.owner] -= 1
        self._bytes_of[entry.owner] -= entry.own_bytes
        self._let_go(entry, entry.items)
        self.let_go_program(entry.program)

    def join_program(self, entry: Entry, program: str) -> None:
        """Let the leases of `program` live as long as `entry`, unless it has a program or was removed."""
        if not entry.program and self._entries.get(entry.id) is entry:
            entry.program = program
            self.hold_program(program)

    def hold_program(self, program: str) -> None:
        if program:
            self._programs[program] += 1
            self.ended.pop(program, None)

    def let_go_program(self, program: str) -> None:
        if program:
            self._programs[program] -= 1
            if not self._programs[program]:
                del self._programs[program]
                self.ended[program] = None

    def _make_room(self) -> None:
        while self._entries:
            if len(self._entries) > self._max_entries:
                held = self._entries_of
            elif self.bytes > self._max_bytes:
                held = self._bytes_of
            else:
                return
            owner = max(held, key=held.__getitem__)
            self.remove(next(entry for entry in self._entries.values() if entry.owner == owner))

    def _hold(self, entry: Entry, items: Iterable[Item]) -> None:
        scope = entry.scope
        for item in items:
            self._holders[scope, item] += 1
            if self._holders[scope, item] == 1:
                self._bytes_of[entry.owner] += len(item.data)
                self._by_id[scope, item.id] = item

    def _let_go(self, entry: Entry, items: Iterable[Item]) -> None:
        scope = entry.scope
        for item in items:
            self._holders[scope, item] -= 1
            if not self._holders[scope, item]:
                del self._holders[scope, item]
                self._bytes_of[entry.owner] -= len(item.data)
                if self._by_id.get((scope, item.id)) == item:
                    del self._by_id[scope, item.id]


@dataclass(kw_only=True)
class Storage:
    """The stored items that a request continues, and the storing of its response."""

    store: ResponseStore | None
    scope: str
    """The key's scope of the store, made from `salt`."""
    keep: bool
    """Whether the response is stored."""
    salt: str = ""
    """The cache scope that the client names."""
    named_by: str = ""
    """The field that names what the request continues."""
    previous: Entry | None = None
    program: str = ""
    """Program under which the KV is leased, without its scope: that of the chain or the conversation; empty
    for no lease, or if the client names a program, whose leases end by their times."""
    before: tuple[Item, ...] = ()
    """The items of `previous`, which the model sees before the input."""
    additional_tools: list[list[Fields]] = field(default_factory=list)
    """The tools of each item of type additional_tools, of `before` and of the input."""
    running: bool = False
    own: list[Item] = field(default_factory=list)
    """The items of the request's input."""

    def echo(self) -> Body:
        """The fields of the response about storing."""
        body: Body = {"previous_response_id": None, "store": self.keep}
        if isinstance(self.previous, Conversation):
            body["conversation"] = {"id": self.previous.id}
        elif self.previous is not None:
            body["previous_response_id"] = self.previous.id
        return body

    def history(self, fields: Fields) -> list[Fields]:
        """The items before those of the input."""
        if len(self.before) > MAX_OBJECTS:
            raise InvalidRequest(
                f"{self.named_by} has {len(self.before)} items; at most {MAX_OBJECTS} are taken.",
                field=self.named_by,
                remedy="Send a shorter conversation as input.",
            )
        return [
            Fields(_values(item), f"{self.named_by}.items[{index}]", fields.body)
            for index, item in enumerate(self.before)
        ]

    def resolved(self, item: Fields) -> Fields:
        """The stored item, if `item` is a reference to one."""
        kind: str | None = item.take("type", str)
        if kind != "item_reference" and not (kind is None and item.given("id") and not item.given("role")):
            return item
        path = item.path("id")
        found = None if self.store is None else self.store.find_item(item.need("id"), self.scope)
        if found is None:
            raise InvalidRequest(f"{path}: no stored item has this id.", field=path, remedy=NOT_STORED)
        item.refuse_rest()
        return Fields(_values(found), item.path("").rstrip("."), item.body)

    def take_own(self, fields: Fields, rid: str) -> None:
        """Keep the items of ``input``, which have been checked."""
        given: str | list[dict[str, msgspec.Raw]] | None
        given = fields.take("input", str | list[dict[str, msgspec.Raw]])
        if given and (self.keep or isinstance(self.previous, Conversation)):
            if isinstance(given, str):
                given = [{"role": _raw("user"), "content": _raw(given)}]
            self.own = self.stored_items(given, rid)

    def stored_items(self, given: Iterable[dict[str, msgspec.Raw]], rid: str) -> list[Item]:
        """The items as they are stored. They have been checked."""
        items = []
        for index, one in enumerate(given):
            referenced = None
            if self.store is not None and one.keys() <= {"type", "id"}:
                referenced = self.store.find_item(_text(one, "id"), self.scope)
            items.append(_stored(one, rid, index) if referenced is None else referenced)
        return items

    @property
    def _leased(self) -> str:
        """The id of `program` in the engine."""
        return self.program and KEY.get().own_id(scoped(self.program, self.salt))

    def begin(self) -> None:
        """Note that the request runs. `end` must follow. Raises `ConversationLocked` if another request runs
        that will append to the conversation, or has appended since the body was parsed."""
        if isinstance(self.previous, Conversation):
            if self.previous.locked or self.before != tuple(self.previous.items):
                raise ConversationLocked(
                    "Another request goes on from this conversation.",
                    field="conversation",
                    remedy="Send it again when that request has ended.",
                )
            self.previous.locked = True
        self.running = True
        if self.store is not None:
            self.store.hold_program(self._leased)
            if self.previous is not None:
                self.store.use(self.previous)
                if self._leased:
                    self.store.join_program(self.previous, self._leased)

    def end(self) -> None:
        """Note that the request has ended: what was removed while it ran has leases no longer. A second call
        has no effect."""
        if not self.running:
            return
        self.running = False
        if isinstance(self.previous, Conversation):
            self.previous.locked = False
        if self.store is not None:
            self.store.let_go_program(self._leased)

    def save(self, response: Body) -> None:
        """Store the finished `response`."""
        if self.store is None:
            return
        output = [Item(one["id"], msgspec.json.encode(one)) for one in response["output"]]
        if isinstance(self.previous, Conversation):
            self.store.append(self.previous, [*self.own, *output])
        if self.keep:
            self.store.add(
                StoredResponse(
                    id=response["id"],
                    scope=self.scope,
                    items=[*self.before, *self.own, *output],
                    program=self._leased,
                    body=msgspec.json.encode(response),
                    outputs=len(output),
                )
            )


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
"""Type of an item → prefix of its id."""


def _stored(given: dict[str, msgspec.Raw], rid: str, index: int) -> Item:
    """An item of an input, with the fields that OpenAI's API adds."""
    one: Body = {name: raw for name, raw in given.items() if bytes(raw) != b"null"}
    kind = _text(given, "type") or "message"
    item_id = _text(given, "id") or f"{_PREFIXES.get(kind, 'item')}_{rid.partition('_')[2]}_in{index}"
    if kind == "message" and (text := _text(given, "content")):
        part: Body = {"type": "input_text", "text": text}
        if _text(given, "role") == "assistant":
            part = {"type": "output_text", "text": text, "annotations": []}
        one["content"] = [part]
    return Item(item_id, msgspec.json.encode({"status": "completed", **one, "type": kind, "id": item_id}))


def _text(values: dict[str, msgspec.Raw], field: str) -> str:
    """The text in `field`; "" if there is something else."""
    raw = bytes(values.get(field, b""))
    return msgspec.json.decode(raw, type=str) if raw.startswith(b'"') else ""


def _raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(text))


def _values(item: Item) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(item.data, type=dict[str, msgspec.Raw])


def take_storage(store: ResponseStore | None, fields: Fields, rid: str) -> Storage:
    """Take ``store``, ``previous_response_id`` and ``conversation`` of the request `rid`. `store` is None on
    a server that stores nothing."""
    asked: bool | None = fields.take("store", bool)
    previous_id: str | None = fields.take("previous_response_id", str)
    conversation_id = _take_conversation(fields)
    salt: str = fields.take("cache_salt", str, "")
    scope = KEY.get().own_id(salt)
    if previous_id is not None and conversation_id is not None:
        raise InvalidRequest(
            "previous_response_id and conversation are both given; give one.", field="conversation"
        )
    if store is None:
        given = {"store": asked, "previous_response_id": previous_id, "conversation": conversation_id}
        for name, value in given.items():
            if value:
                raise UnsupportedField(f"{name}: this server stores nothing.", field=name, remedy=NOT_STORED)
        return Storage(store=None, scope=scope, salt=salt, keep=False)
    # A batch of 50,000 lines that are stored would push out all other entries.
    keep = not IN_BATCH.get() if asked is None else asked
    storage = Storage(store=store, scope=scope, salt=salt, keep=keep)
    if previous_id is not None:
        found = store.find(StoredResponse, previous_id, scope)
        if found is None:
            raise PreviousResponseNotFound(
                f"Previous response with id {previous_id[:100]!r} not found.",
                field="previous_response_id",
                remedy="It was not stored, or dropped for later ones. Send the whole conversation as input.",
            )
        storage.named_by, storage.previous = "previous_response_id", found
        storage.program = _root(found)
    elif conversation_id is not None:
        storage.named_by = "conversation"
        storage.previous = needed(store, Conversation, conversation_id, scope, "conversation")
        storage.program = conversation_id
    elif asked:
        storage.program = rid
    if storage.previous is not None:
        storage.before = tuple(storage.previous.items)
    return storage


def needed(
    store: ResponseStore | None, kind: type[T], entry_id: str, scope: str, field: str | None = None
) -> T:
    """The entry. Raises `NotFound` if it is not stored."""
    found = None if store is None else store.find(kind, entry_id, scope)
    if found is None:
        name = "Response" if kind is StoredResponse else "Conversation"
        raise NotFound(f"{name} with id {entry_id[:100]!r} not found.", field=field)
    return found


def _root(response: StoredResponse) -> str:
    """The program of the chain that `response` is in, without its key and its scope."""
    return response.program.partition("@")[0].rpartition("/")[2] or response.id


def _take_conversation(fields: Fields) -> str | None:
    """The id in ``conversation``, which is the id itself or ``{id}``."""
    given = fields.take("conversation", str | dict[str, msgspec.Raw])
    if not isinstance(given, dict):
        return given
    inner = fields.take_object("conversation")
    assert inner is not None
    found: str = inner.need("id")
    inner.refuse_rest()
    return found
