"""Replicas over HTTP: listing, adding, draining, restarting."""

from __future__ import annotations

import httpx

from tests.server.fake_frontend import FakeFrontend, LiveServer


def test_replicas_are_listed_added_drained_and_restarted(http: httpx.Client) -> None:
    def states() -> dict[str, str]:
        return {one["name"]: one["state"] for one in http.get("/replicas").json()["replicas"]}

    assert states() == {"0": "up", "1": "up"}
    assert http.post("/replicas").json()["name"] == "2"
    assert states() == {"0": "up", "1": "up", "2": "up"}
    assert http.post("/replicas/1/drain", json={"limit_s": 2.5}).json() == {"name": "1", "state": "gone"}
    assert states() == {"0": "up", "2": "up"}
    assert http.post("/replicas/0/restart").json()["state"] == "up"
    missing = http.post("/replicas/1/drain")
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "name"


def test_the_limit_of_a_drain(http: httpx.Client, frontend: FakeFrontend) -> None:
    http.post("/replicas/1/drain", json={"limit_s": 2.5}).raise_for_status()
    http.post("/replicas/0/restart").raise_for_status()
    assert frontend.fleet.limits == [2.5, 30.0], "the server's drain_s without one"
    for body, message in (
        ({"limit_s": -1}, "limit_s is -1"),
        ({"limit": 1}, "Did you mean limit_s?"),
        ({"limit_s": "x"}, "limit_s"),
    ):
        answer = http.post("/replicas/0/drain", json=body)
        assert answer.status_code == 400
        assert message in answer.text


def test_replicas_need_the_key() -> None:
    with LiveServer(FakeFrontend(), api_key="secret") as server:
        for method, path in (("GET", ""), ("POST", ""), ("POST", "/0/drain"), ("POST", "/0/restart")):
            assert httpx.request(method, f"{server.url}/replicas{path}").status_code == 401
