"""Stored responses and conversations: reading, changing and deleting them.

The query ``cache_salt`` names the cache scope, as the field of that name in requests that generate.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ramify.errors import InvalidRequest, NotFound, UnsupportedField
from ramify.runtime.server.fields import Fields, json_response, page_limit, page_of
from ramify.runtime.server.leases import scoped
from ramify.runtime.server.openai.bodies import Body
from ramify.runtime.server.openai.responses.endpoint import (
    end_leases,
    stored_by,
    take_included,
    take_metadata,
)
from ramify.runtime.server.openai.responses.input import TurnBuilder, take_items
from ramify.runtime.server.openai.responses.store import (
    NOT_STORED,
    Conversation,
    Item,
    Storage,
    StoredResponse,
    T,
    needed,
)
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import KEY, Service
from ramify.runtime.server.tables.responses import CONVERSATIONS, NEW_ITEMS, RESPONSES, UPDATED_CONVERSATION
from ramify.spelling import check_word

router = Router()

MAX_ITEMS = 20
"""Maximum number of items that one request adds to a conversation. It is OpenAI's."""
DEFAULT_LIMIT = 20
MAX_LIMIT = 100
"""Maximum number of items of a page, and the number without ``limit``. Both are OpenAI's."""

_REMEDIES = {"stream": "Get the whole response.", "starting_after": "Get the whole response."}
_LISTING = ("limit", "order", "after")


@router.get(RESPONSES.path + "/{response_id}", any_key=True)
async def get_response(request: Request, response_id: str) -> Response:
    salt = _take_query(request)["cache_salt"]
    found = _used(request, StoredResponse, response_id, salt)
    return json_response(msgspec.Raw(found.body))


@router.delete(RESPONSES.path + "/{response_id}", any_key=True)
async def delete_response(request: Request, response_id: str) -> Response:
    salt = _take_query(request)["cache_salt"]
    await _remove(request, _used(request, StoredResponse, response_id, salt))
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get(RESPONSES.path + "/{response_id}/input_items", any_key=True)
async def list_input_items(request: Request, response_id: str) -> Response:
    query = _take_query(request, _LISTING)
    found = _used(request, StoredResponse, response_id, query["cache_salt"])
    return json_response(_page(found.items[: len(found.items) - found.outputs], query))


@router.post(CONVERSATIONS.path, any_key=True)
async def create_conversation(request: Request) -> Response:
    store = stored_by(request)
    if store is None:
        raise UnsupportedField("This server stores nothing.", field="conversation", remedy=NOT_STORED)
    conversation_id = f"conv_{secrets.token_hex(16)}"

    def parse(service: Service, fields: Fields) -> Conversation:
        salt: str = fields.take("cache_salt", str, "")
        scope = KEY.get().own_id(salt)
        items = _take_new_items(service, fields, scope, conversation_id)
        metadata = take_metadata(fields)
        fields.finish(CONVERSATIONS.whole)
        return Conversation(
            id=conversation_id,
            scope=scope,
            items=items,
            program=KEY.get().own_id(scoped(conversation_id, salt)),
            created_at=int(time.time()),
            metadata=metadata,
        )

    conversation, headers = await parse_body(request, CONVERSATIONS, parse)
    Service.serving(request).begin(KEY.get(), None)
    store.add(conversation)
    await end_leases(Service.serving(request), store)
    return json_response(conversation.body(), headers)


@router.get(CONVERSATIONS.path + "/{conversation_id}", any_key=True)
async def get_conversation(request: Request, conversation_id: str) -> Response:
    return json_response(_conversation(request, conversation_id)[0].body())


@router.post(CONVERSATIONS.path + "/{conversation_id}", uses_model=False, any_key=True)
async def update_conversation(request: Request, conversation_id: str) -> Response:
    conversation, _ = _conversation(request, conversation_id)

    def parse(service: Service, fields: Fields) -> dict[str, str]:
        metadata = take_metadata(fields)
        fields.finish(UPDATED_CONVERSATION.whole)
        return metadata

    conversation.metadata, headers = await parse_body(request, UPDATED_CONVERSATION, parse)
    return json_response(conversation.body(), headers)


@router.delete(CONVERSATIONS.path + "/{conversation_id}", any_key=True)
async def delete_conversation(request: Request, conversation_id: str) -> Response:
    await _remove(request, _conversation(request, conversation_id)[0])
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post(CONVERSATIONS.path + "/{conversation_id}/items", any_key=True)
async def create_items(request: Request, conversation_id: str) -> Response:
    conversation, _ = _conversation(request, conversation_id, ("include",))

    def parse(service: Service, fields: Fields) -> list[Item]:
        rid = f"item_{secrets.token_hex(8)}"
        items = _take_new_items(service, fields, conversation.scope, rid)
        fields.finish(NEW_ITEMS.whole)
        if not items:
            raise InvalidRequest("items is missing or empty.", field="items")
        return items

    items, headers = await parse_body(request, NEW_ITEMS, parse)
    store = stored_by(request)
    assert store is not None
    Service.serving(request).begin(KEY.get(), None)
    store.append(conversation, items)
    await end_leases(Service.serving(request), store)
    return json_response(_page(items, {"order": "asc", "limit": str(MAX_LIMIT)}), headers)


@router.get(CONVERSATIONS.path + "/{conversation_id}/items", any_key=True)
async def list_items(request: Request, conversation_id: str) -> Response:
    conversation, query = _conversation(request, conversation_id, _LISTING)
    return json_response(_page(conversation.items, query))


@router.get(CONVERSATIONS.path + "/{conversation_id}/items/{item_id}", any_key=True)
async def get_item(request: Request, conversation_id: str, item_id: str) -> Response:
    conversation, _ = _conversation(request, conversation_id)
    for item in conversation.items:
        if item.id == item_id:
            return json_response(msgspec.Raw(item.data))
    raise NotFound(f"Item with id {item_id[:100]!r} not found.")


@router.delete(CONVERSATIONS.path + "/{conversation_id}/items/{item_id}", any_key=True)
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    conversation, _ = _conversation(request, conversation_id)
    store = stored_by(request)
    assert store is not None
    if not store.remove_item(conversation, item_id):
        raise NotFound(f"Item with id {item_id[:100]!r} not found.")
    return json_response(conversation.body())


def _conversation(
    request: Request, conversation_id: str, allowed: Sequence[str] = ()
) -> tuple[Conversation, dict[str, str]]:
    query = _take_query(request, allowed)
    return _used(request, Conversation, conversation_id, query["cache_salt"]), query


def _used(request: Request, kind: type[T], entry_id: str, salt: str) -> T:
    """The entry, which is now the most recently used. Raises `NotFound` if it is not stored."""
    store = stored_by(request)
    found = needed(store, kind, entry_id, KEY.get().own_id(salt))
    assert store is not None
    store.use(found)
    return found


async def _remove(request: Request, entry: Conversation | StoredResponse) -> None:
    store = stored_by(request)
    assert store is not None
    store.remove(entry)
    await end_leases(Service.serving(request), store)


def _take_new_items(service: Service, fields: Fields, scope: str, rid: str) -> list[Item]:
    """Take ``items``, which have the form of those in ``input``."""
    storage = Storage(store=None, scope=scope, keep=True)
    given: list[dict[str, msgspec.Raw]] = fields.take("items", list[dict[str, msgspec.Raw]], [])
    if len(given) > MAX_ITEMS:
        raise InvalidRequest(
            f"items has {len(given)} items; at most {MAX_ITEMS} are taken.",
            field="items",
            remedy="Add them by several requests.",
        )
    chat_format = service.frontend.info.chat_format
    if chat_format is None:
        raise InvalidRequest("The model has no chat template.", field="items")
    take_items(fields, "items", TurnBuilder(), chat_format, storage)
    return storage.stored_items(given, rid)


def _take_query(request: Request, allowed: Sequence[str] = ()) -> dict[str, str]:
    """The parameters of the query. Raises `UnsupportedField` for one that is not `allowed`."""
    query = dict(request.query_params)
    included = request.query_params.getlist("include") + request.query_params.getlist("include[]")
    for name in query.keys() - {"cache_salt", "include", "include[]", *allowed}:
        raise UnsupportedField(
            f"{name[:100]} is not a parameter of this request.", field=name[:100], remedy=_REMEDIES.get(name)
        )
    take_included(Fields({"include": msgspec.Raw(msgspec.json.encode(included))}))
    return {"cache_salt": "", **query}


def _page(items: Sequence[Item], query: dict[str, str]) -> Body:
    """A page of `items`: `limit` of them behind the item `after`, in `order`."""
    order = query.get("order", "desc")
    check_word("order", order[:100], ("asc", "desc"))
    ordered = [*items] if order == "asc" else [*reversed(items)]
    limit = page_limit(query.get("limit"), DEFAULT_LIMIT, MAX_LIMIT)
    return page_of(ordered, lambda item: msgspec.Raw(item.data), query.get("after"), limit)
