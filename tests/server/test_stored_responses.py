"""Stored responses and conversations, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import openai
import pytest

from ramify.errors import WorkerDied
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.leases import PROGRAM_LEASE_S
from ramify.runtime.server.openai.responses.endpoint import end_leases
from ramify.runtime.server.openai.responses.store import (
    Conversation,
    ConversationLocked,
    Item,
    ResponseStore,
    StoredResponse,
    take_storage,
)
from tests.server.conftest import MODEL, refused
from tests.server.fake_frontend import FakeFrontend, LiveServer, events

ASK: Any = {"model": MODEL, "max_output_tokens": 8}


def prompt(frontend: FakeFrontend) -> list[tuple[str, str]]:
    """The roles and contents of the last request's turns."""
    return [(turn.role, turn.content) for turn in frontend.requests[-1].chat or ()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_from_an_earlier_one(
    client: openai.OpenAI, frontend: FakeFrontend, stream: bool
) -> None:
    def ask(text: str, **more: Any) -> Any:
        if not stream:
            return client.responses.create(**ASK, input=text, **more)
        *_, last = client.responses.create(**ASK, input=text, stream=True, **more)
        return last.response

    frontend.script = ["one", "two", "three", "four"]
    first = ask("a", instructions="Be brief.")
    assert (first.store, first.previous_response_id) == (True, None)
    second = ask("b", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    # The instructions of the first request are not carried over.
    assert prompt(frontend) == [("user", "a"), ("assistant", "one"), ("user", "b")]
    branch = ask("c", previous_response_id=first.id, store=False)
    assert prompt(frontend)[1:] == [("assistant", "one"), ("user", "c")]
    ask("d", previous_response_id=second.id, instructions="Be long.")
    assert [text for _, text in prompt(frontend)] == ["Be long.", "a", "one", "b", "two", "d"]
    with pytest.raises(openai.BadRequestError) as error:
        ask("e", previous_response_id=branch.id)
    assert error.value.code == "previous_response_not_found"


def test_a_turn_that_goes_on_sends_the_items_that_a_whole_input_has(
    client: openai.OpenAI, frontend: FakeFrontend
) -> None:
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    frontend.script = [call, "done", "done"]
    first = client.responses.create(model=MODEL, input="a", tools=[tool])
    (item,) = first.output
    assert item.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "42"}
    client.responses.create(model=MODEL, input=[result], tools=[tool], previous_response_id=first.id)
    continued = frontend.requests[-1]
    whole: Any = [{"role": "user", "content": "a"}, item.to_dict(), result]
    client.responses.create(model=MODEL, input=whole, tools=[tool], store=False)
    assert continued.chat == frontend.requests[-1].chat


def test_an_item_is_sent_by_reference(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    frontend.script = ["one", "two"]
    first = client.responses.create(**ASK, input="a")
    items: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "b"}]
    second = client.responses.create(**ASK, input=items)
    assert prompt(frontend) == [("assistant", "one"), ("user", "b")]
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [one.type for one in listed] == ["message", "message"]
    assert listed[0].id == first.output[0].id


def test_a_stored_response_is_read_and_deleted(client: openai.OpenAI, http: httpx.Client) -> None:
    first = client.responses.create(**ASK, input="a", metadata={"run": "7"})
    found = client.responses.retrieve(first.id)
    assert found == first
    assert found.metadata == {"run": "7"}
    assert refused(http.get(f"/v1/responses/{first.id}?stream=true"))["param"] == "stream"
    assert http.get(f"/v1/responses/{first.id}?include=message.output_text.logprobs").status_code == 200
    client.responses.delete(first.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(first.id)  # type: ignore[operator]


def test_input_items_come_in_pages(client: openai.OpenAI, http: httpx.Client) -> None:
    texts = [f"number {i}" for i in range(5)]
    given: Any = [{"role": "user", "content": text} for text in texts]
    first = client.responses.create(**ASK, input=given)
    second = client.responses.create(**ASK, input="last", previous_response_id=first.id)

    def content(item: Any) -> str:
        return str(item.content[0].text)

    page = client.responses.input_items.list(first.id, order="asc", limit=2)
    assert [content(item) for item in page] == texts
    assert (len(page.data), page.has_more) == (2, True)
    assert [content(item) for item in client.responses.input_items.list(first.id)] == texts[::-1]
    all_items = [*client.responses.input_items.list(second.id, order="asc")]
    assert [content(item) for item in all_items] == [*texts, first.output_text, "last"]
    assert len({item.id for item in all_items}) == 7
    for query, field in [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=" + "9" * 5000, "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
        ("before=x", "before"),
    ]:
        assert refused(http.get(f"/v1/responses/{first.id}/input_items?{query}"))["param"] == field


def test_scopes_do_not_see_each_other(client: openai.OpenAI, http: httpx.Client) -> None:
    def ask(salt: str, **more: Any) -> Any:
        return client.responses.create(**ASK, input="a", extra_body={"cache_salt": salt}, **more)

    first = ask("mine")
    ask("mine", previous_response_id=first.id)
    for salt in ("", "yours"):
        with pytest.raises(openai.BadRequestError):
            ask(salt, previous_response_id=first.id)
        assert http.get(f"/v1/responses/{first.id}?cache_salt={salt}").status_code == 404
    assert http.get(f"/v1/responses/{first.id}?cache_salt=mine").status_code == 200


def test_a_conversation(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    start: Any = [{"role": "system", "content": "Be brief."}]
    conversation = client.conversations.create(items=start, metadata={"a": "1"})
    frontend.script = ["one", "two"]
    first = client.responses.create(**ASK, input="a", conversation=conversation.id)
    assert first.conversation is not None
    assert first.conversation.id == conversation.id
    client.responses.create(**ASK, input="b", conversation={"id": conversation.id}, store=False)
    assert [text for _, text in prompt(frontend)] == ["Be brief.", "a", "one", "b"]
    more: Any = [{"role": "user", "content": "c"}]
    (added,) = client.conversations.items.create(conversation.id, items=more).data
    items: Any = [*client.conversations.items.list(conversation.id, order="asc", limit=3)]
    assert [item.content[0].text for item in items] == ["Be brief.", "a", "one", "b", "two", "c"]
    assert added.id is not None
    assert client.conversations.items.retrieve(added.id, conversation_id=conversation.id) == added
    client.conversations.items.delete(added.id, conversation_id=conversation.id)
    assert len([*client.conversations.items.list(conversation.id)]) == 5
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(added.id, conversation_id=conversation.id)
    assert client.conversations.update(conversation.id, metadata={"b": "2"}).metadata == {"b": "2"}
    assert client.conversations.retrieve(conversation.id).metadata == {"b": "2"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ASK, input="c", conversation=conversation.id)
    assert client.responses.retrieve(first.id).output_text == "one"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("", {"items": [{"role": "critic", "content": "x"}]}, "items[0].role"),
        ("", {"items": [{"role": "user"}]}, "items[0].content"),
        ("", {"items": [{"type": "item_reference", "id": "x"}]}, "items[0].id"),
        ("", {"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ("", {"items": 5}, "items"),
        ("", {"metadata": {"a": 1}}, "metadata[...]"),
        ("", {"name": "x"}, "name"),
        ("/items", {}, "items"),
        ("/items", {"items": [{"role": "user", "content": 5}]}, "items[0].content"),
        ("/items", {"items": [{"role": "user", "content": "x"}], "more": 1}, "more"),
    ],
)
def test_wrong_items_of_a_conversation(
    client: openai.OpenAI, http: httpx.Client, path: str, body: Any, field: str
) -> None:
    url = f"/v1/conversations/{client.conversations.create().id}{path}" if path else "/v1/conversations"
    assert refused(http.post(url, json=body))["param"] == field


def test_the_kv_of_what_is_continued_is_leased_until_it_is_dropped(
    client: openai.OpenAI, frontend: FakeFrontend
) -> None:
    first = client.responses.create(**ASK, input="a")
    assert frontend.requests[-1].hint is None  # nobody has come back to it yet
    second = client.responses.create(**ASK, input="b", previous_response_id=first.id)
    third = client.responses.create(**ASK, input="c", previous_response_id=second.id)
    kept = client.responses.create(**ASK, input="d", store=True)
    hints = [request.hint for request in frontend.requests if request.hint]
    assert [(hint.program, hint.lease_s) for hint in hints] == [
        (first.id, 86_400.0),
        (first.id, 86_400.0),
        (kept.id, 86_400.0),
    ]
    client.responses.delete(second.id)
    assert frontend.ended_programs == []
    client.responses.delete(third.id)
    assert frontend.ended_programs == []
    client.responses.delete(first.id)
    assert frontend.ended_programs == [first.id]
    conversation = client.conversations.create()
    client.responses.create(**ASK, input="e", conversation=conversation.id, store=False)
    client.conversations.delete(conversation.id)
    assert frontend.ended_programs == [first.id, conversation.id]


@pytest.mark.parametrize("extra", [{}, {"cache_salt": "mine"}])
def test_leases_end_with_what_is_stored(
    client: openai.OpenAI, frontend: FakeFrontend, http: httpx.Client, extra: Any
) -> None:
    ask: Any = ASK | {"extra_body": extra}
    asked = client.responses.create(**ask, input="a", store=True)
    first = client.responses.create(**ask, input="a")
    client.responses.create(**ask, input="b", previous_response_id=first.id, store=False)
    conversation = client.conversations.create(extra_body=extra).id
    client.responses.create(**ask, input="c", conversation=conversation, store=False)
    hints = [request.hint for request in frontend.requests if request.hint]
    assert len(hints) == 3
    for path in (f"responses/{asked.id}", f"responses/{first.id}", f"conversations/{conversation}"):
        assert http.delete(f"/v1/{path}", params=extra).status_code == 200
    assert frontend.ended_programs == [hint.program for hint in hints]


@pytest.mark.parametrize("by_field", [True, False])
def test_a_program_that_the_client_names_has_leases_that_end_by_themselves(
    http: httpx.Client, frontend: FakeFrontend, by_field: bool
) -> None:
    headers = {} if by_field else {"x-ramify-program": "k"}
    body = ASK | {"input": "a", "store": True} | ({"prompt_cache_key": "k"} if by_field else {})
    for _ in range(2):
        answer = http.post("/v1/responses", json=body, headers=headers)
        body["previous_response_id"] = answer.json()["id"]
    hints = [request.hint for request in frontend.requests if request.hint]
    assert [(hint.program, hint.lease_s) for hint in hints] == [("k", PROGRAM_LEASE_S)] * 2
    http.delete(f"/v1/responses/{body['previous_response_id']}")
    assert frontend.ended_programs == []  # the program may have other requests


def test_one_request_at_a_time_goes_on_from_a_conversation(
    client: openai.OpenAI, frontend: FakeFrontend, http: httpx.Client
) -> None:
    conversation = client.conversations.create().id
    frontend.hold_after = 1
    stream = client.responses.create(**ASK, input="a", conversation=conversation, stream=True)
    assert frontend.held.wait(10)
    for streamed in (False, True):
        body = ASK | {"input": "b", "conversation": conversation, "stream": streamed}
        error = refused(http.post("/v1/responses", json=body))
        assert (error["code"], error["param"]) == ("conversation_locked", "conversation")
    stream.close()
    assert frontend.closed.wait(10)
    frontend.hold_after, frontend.script = None, ["one"]
    client.responses.create(**ASK, input="c", conversation=conversation)
    assert prompt(frontend) == [("user", "c")]  # nobody has read the answer to the first
    assert len(client.conversations.items.list(conversation).data) == 2


def test_a_conversation_that_has_grown_since_the_body_was_parsed() -> None:
    store = ResponseStore()
    conversation = Conversation(id="c", scope="", items=[], created_at=0)
    store.add(conversation)
    first, second = (take_storage(store, Fields.parse(b'{"conversation": "c"}'), rid) for rid in "ab")
    first.begin()
    first.save({"id": "resp_1", "output": [{"id": "msg_1"}]})
    first.end()
    with pytest.raises(ConversationLocked):
        second.begin()
    take_storage(store, Fields.parse(b'{"conversation": "c"}'), "c").begin()
    for ended in (first, second):
        ended.end()
    assert conversation.locked


def test_leases_that_cannot_be_ended_now_are_ended_later(
    client: openai.OpenAI, frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (client.responses.create(**ASK, input=text, store=True) for text in "ab")

    def fail(message: Any) -> None:
        raise WorkerDied("It died.")

    with monkeypatch.context() as failing:
        failing.setattr(frontend.control, "_tell", fail)
        client.responses.delete(first.id)
        client.responses.delete(second.id)
        frontend.script = ["done"]
        assert client.responses.create(**ASK, input="c").output_text == "done"
    client.responses.create(**ASK, input="d")
    assert frontend.ended_programs == [first.id, second.id]


def test_a_client_that_vanishes_leaves_no_leases() -> None:
    """Its request is cancelled at the first await of `end_leases`."""

    async def end() -> list[str]:
        store, ended = ResponseStore(), []
        store.ended |= {"a": None, "b": None}

        async def end_program(program: str) -> None:
            await asyncio.sleep(0)
            ended.append(program)

        service: Any = SimpleNamespace(end_in_engine=end_program)
        first = asyncio.create_task(end_leases(service, store))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait((first,))
        await end_leases(service, store)
        return ended

    assert asyncio.run(end()) == ["a", "b"]


def test_a_response_that_is_deleted_while_it_is_continued(
    client: openai.OpenAI, frontend: FakeFrontend
) -> None:
    first = client.responses.create(**ASK, input="a", store=True)
    frontend.hold_after = 1
    stream = client.responses.create(
        **ASK, input="b", previous_response_id=first.id, store=False, stream=True
    )
    assert frontend.held.wait(10)
    client.responses.delete(first.id)
    assert frontend.ended_programs == []  # the lease of the second begins at its end
    stream.close()
    assert frontend.closed.wait(10)
    client.conversations.create()  # a later request
    assert frontend.ended_programs == [first.id]


def test_a_server_that_stores_nothing() -> None:
    with LiveServer(FakeFrontend(), store=False) as server, httpx.Client(base_url=server.url) as http:
        ask = ASK | {"input": "a"}
        answer = http.post("/v1/responses", json=ask)
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        assert http.get(f"/v1/responses/{answer.json()['id']}").status_code == 404
        for field, value in (("store", True), ("previous_response_id", "x"), ("conversation", "x")):
            error = refused(http.post("/v1/responses", json=ask | {field: value}))
            assert (error["param"], error["code"]) == (field, "unsupported_field")
            assert "--no-store" in error["remedy"]
        assert http.post("/v1/responses", json=ask | {"store": False}).status_code == 200
        assert refused(http.post("/v1/conversations", json={}))["code"] == "unsupported_field"


def test_a_failed_response_is_not_stored(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.fail_after = (1, WorkerDied("It died."))
    *_, failed = events(http.post("/v1/responses", json=ASK | {"input": "a", "stream": True}))
    assert failed["response"]["status"] == "failed"
    assert http.get(f"/v1/responses/{failed['response']['id']}").status_code == 404


# --- the store alone --------------------------------------------------------------------------------


def response(number: int, before: list[Item], program: str = "") -> StoredResponse:
    own = [Item(f"i{number}", b"x" * 100)]
    return StoredResponse(
        id=f"r{number}", scope="", items=[*before, *own], program=program, body=b"y" * 10, outputs=1
    )


@pytest.fixture
def store() -> ResponseStore:
    return ResponseStore(max_entries=3, max_bytes=1000)


def test_shared_items_are_counted_once(store: ResponseStore) -> None:
    first = response(1, [])
    second = response(2, first.items)
    store.add(first)
    store.add(second)
    assert store.bytes == 220
    store.remove(first)
    assert store.bytes == 210  # the second has the item of the first
    store.remove(second)
    assert (store.bytes, store.find_item("i1", "")) == (0, None)


def test_the_least_recently_used_are_dropped(store: ResponseStore) -> None:
    for number in range(3):
        store.add(response(number, [], program=f"p{number}"))
    first = store.find(StoredResponse, "r0", "")
    assert first is not None
    store.use(first)
    store.add(response(3, []))
    assert store.find(StoredResponse, "r1", "") is None
    assert store.find(StoredResponse, "r0", "") is not None
    assert [*store.ended] == ["p1"]


def test_a_key_that_floods_the_store_drops_its_own(store: ResponseStore) -> None:
    ours = dataclasses.replace(response(0, []), owner="bob")
    store.add(ours)
    for number in range(1, 9):
        store.add(dataclasses.replace(response(number, []), owner="alice"))
    assert store.find(StoredResponse, "r0", "") is ours
    assert store.find(StoredResponse, "r8", "") is not None
    large = [Item("large", b"x" * 700)]
    store.add(dataclasses.replace(response(9, large), owner="alice"))
    assert store.find(StoredResponse, "r0", "") is ours
    assert (len(store), store.bytes) == (2, 920)


def test_only_requests_that_run_are_uses(store: ResponseStore) -> None:
    for number in range(3):
        store.add(response(number, []))
    body = msgspec.json.encode({"previous_response_id": "r0"})
    wrong = take_storage(store, Fields.parse(body), "resp_4")  # another field is refused, and nothing runs
    store.add(response(3, []))
    assert store.find(StoredResponse, "r0", "") is None
    wrong.begin()  # it was dropped while the body was parsed in a thread
    wrong.end()
    body = msgspec.json.encode({"previous_response_id": "r1"})
    take_storage(store, Fields.parse(body), "resp_5").begin()
    store.add(response(5, []))
    assert store.find(StoredResponse, "r1", "") is not None


def test_bytes_are_bounded(store: ResponseStore) -> None:
    conversation = Conversation(id="c", scope="", items=[], created_at=0)
    store.add(conversation)
    store.append(conversation, [Item("a", b"x" * 900)])
    store.add(response(1, []))
    assert store.find(Conversation, "c", "") is None
    assert store.bytes == 110
    store.append(conversation, [Item("b", b"x" * 900)])  # it was dropped
    assert (store.bytes, len(store)) == (110, 1)
