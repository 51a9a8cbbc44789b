"""GET and DELETE /cache, on a frontend with a scripted cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ramify.cache_contents import CacheContents, Hold, Unheld
from ramify.engine_messages import GetCache, ReleaseHold, Reply
from ramify.runtime.fleet.stats import merged
from tests.server.conftest import CHAT, GENERATE
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer
from tests.server.test_keys import write

KEY = {"authorization": "Bearer k"}


def hold(owner: str, **fields: Any) -> Hold:
    given = {"kind": "session", "name": "codex", "client": "codex/1", "scope": "", "prefixes": 1}
    numbers = {"tokens": 30, "pages": 2, "seconds_left": 60.0, "needed_in": None}
    return Hold(owner=owner, **given | numbers | fields)


def contents(*holds: Hold, **fields: Any) -> CacheContents:
    pages = {"total": 64, "free": 40, "evictable": 8, "leased": 10, "in_use": 6, "pinned": 2, "pinnable": 32}
    given = {f"pages_{name}": value for name, value in pages.items()}
    unheld = (Unheld(scope="", tokens=9, pages=1, ids=(104, 105)),)
    return CacheContents(**given, page_size=16, page_bytes=1024, holds=holds, more_holds=0, unheld=unheld)


class Holding(FakeFrontend):
    """A frontend whose cache holds something for ``ada``, and with `several` for ``bob``."""

    several = False

    async def _ask(self, message: Any) -> Any:
        if isinstance(message, GetCache):
            self.calls.append(message)
            ids = (115, 101, 99, 114, 101, 116) if message.ids else ()
            held = [hold("ada/1@x", ids=ids), *([hold("bob/2")] if self.several else [])]
            found = [one for one in held if one.owner.startswith(message.owners)]
            return Reply(rid=message.rid, cache=contents(*found))
        if isinstance(message, ReleaseHold):
            self.calls.append(message)
            return Reply(rid=message.rid, released=2 if message.owner == "ada/1@x" else 0)
        return await super()._ask(message)


@pytest.fixture
def http(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    config: dict[str, Any] = getattr(request, "param", {})
    with LiveServer(Holding(), **config) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    ("http", "text"), [({"live_texts": True}, "secret"), ({"live_texts": False}, None)], indirect=["http"]
)
def test_texts_only_where_the_server_shows_them(http: httpx.Client, text: str | None) -> None:
    answer = http.get("/cache")
    (found,) = answer.json()["models"]
    (held,) = found["holds"]
    assert (found["model"], found["pages_pinned"], found["page_bytes"]) == (MODEL, 2, 1024)
    assert (held["owner"], held["client"], held["seconds_left"], held["needed_in"]) == (
        "ada/1@x",
        "codex/1",
        60.0,
        None,
    )
    assert held.get("text") == text
    assert ("secret" in answer.text) == (text is not None)
    assert "ids" not in held


def test_a_hold_is_released_by_its_name(http: httpx.Client) -> None:
    answer = http.delete("/cache/ada%2F1@x")
    assert (answer.status_code, answer.json()) == (200, {"owner": "ada/1@x", "released": 2})
    refused = http.delete("/cache/nobody")
    assert refused.status_code == 404
    assert "'nobody' holds nothing" in refused.json()["error"]["message"]


@pytest.mark.parametrize("http", [{"api_key": "k"}], indirect=True)
def test_the_cache_needs_the_key(http: httpx.Client) -> None:
    assert http.get("/cache").status_code == http.delete("/cache/ada").status_code == 401
    assert http.get("/cache", headers=KEY).status_code == 200


def test_a_key_sees_and_releases_its_own_holds_alone(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.toml", ada={}, bob={}, root={"admin": True})
    frontend = Holding()
    frontend.several = True
    with LiveServer(frontend, keys=str(keys)) as server, httpx.Client(base_url=server.url) as http:

        def held(name: str) -> Any:
            (found,) = http.get("/cache", headers={"x-api-key": f"rk-{name}"}).json()["models"]
            return found, [(one["owner"], one["key"]) for one in found["holds"]]

        def release(name: str, owner: str) -> int:
            return http.delete(f"/cache/{owner}", headers={"x-api-key": f"rk-{name}"}).status_code

        (of_all, whose), (of_ada, hers), (_, his) = held("root"), held("ada"), held("bob")
        assert whose == [("ada/1@x", "ada"), ("bob/2", "bob")]
        assert (hers, his) == ([("1@x", "ada")], [("2", "bob")])
        assert {"pages_in_use", "unheld"} <= of_all.keys()
        assert of_ada.keys() == {"model", "page_size", "page_bytes", "holds", "more_holds"}
        assert [release("bob", owner) for owner in ("ada/1@x", "1@x")] == [404, 404]
        assert [release("ada", "ada/1@x"), release("ada", "1@x"), release("root", "ada/1@x")] == [
            404,
            200,
            200,
        ]


def test_a_pin_may_not_outlast_the_longest_lease() -> None:
    frontend = FakeFrontend()
    with LiveServer(frontend, max_lease_s=5.0) as server, httpx.Client(base_url=server.url) as http:
        pin = {"program": "p", "lease_s": 6.0, "pinned": True}
        answer = http.post("/generate", json=GENERATE | {"program": pin})
        assert answer.status_code == 400
        assert "The pin is for 6 s; this server keeps one for at most 5 s" in answer.text
        assert http.post("/generate", json=GENERATE | {"program": pin | {"lease_s": 5}}).status_code == 200
    (request,) = frontend.requests
    assert request.hint is not None
    assert (request.hint.pinned, request.hint.lease_s) == (True, 5.0)


def test_a_client_cannot_name_another_one() -> None:
    frontend = FakeFrontend()
    with LiveServer(frontend) as server, httpx.Client(base_url=server.url) as http:
        program = {"program": "p", "client": "somebody else"}
        http.post("/generate", json=GENERATE | {"program": program}, headers={"user-agent": "me/1"})
        http.post("/v1/chat/completions", json=CHAT, headers={"x-ramify-lease": "9", "user-agent": "me/1"})
    assert [one.hint.client for one in frontend.requests if one.hint] == ["me/1", "me/1"]


def test_replicas_are_told_side_by_side() -> None:
    replies = {
        name: Reply(rid="", cache=contents(hold(owner))) for name, owner in (("0", "ada"), ("1", "bob"))
    }
    found = merged(replies, {"0": "up", "1": "up"}).cache
    assert found is not None
    assert (found.pages_total, found.pages_pinnable, found.page_size, found.page_bytes) == (128, 64, 16, 1024)
    assert [(one.owner, one.replica) for one in found.holds] == [("ada", "0"), ("bob", "1")]
    assert [one.replica for one in found.unheld] == ["0", "1"]
    released = {name: Reply(rid="", released=number) for name, number in (("0", 2), ("1", 3))}
    assert merged(released, {"0": "up", "1": "up"}).released == 5
