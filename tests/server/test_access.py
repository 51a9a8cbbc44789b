"""Requests that web pages can make a browser send to a server on the same machine."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import httpx
import openai
import pytest

import ramify as rm
from ramify.cli.main import main
from ramify.errors import Unauthorized
from ramify.runtime.config import ServerConfig
from ramify.runtime.server.app.access import RefuseWebPages
from tests.browser import needs_browser, rendered, words
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer

JSON = {"content-type": "application/json"}
APP = "https://app.example.com"


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


def send(server: LiveServer, head: str, body: bytes = b"") -> Answer:
    """Send a request with exactly the lines `head`; returns the answer."""
    length = f"\r\ncontent-length: {len(body)}" if body else ""
    lines = head.strip().replace("\n", "\r\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{lines}{length}\r\nconnection: close\r\n\r\n".encode("latin-1") + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    top, _, rest = answer.partition(b"\r\n\r\n")
    first, *others = top.decode().split("\r\n")
    return Answer(int(first.split()[1]), httpx.Headers([tuple(line.split(": ", 1)) for line in others]), rest)


def get(server: LiveServer, host: str, more: str = "", path: str = "/live") -> Answer:
    return send(server, f"GET {path} HTTP/1.1\nhost: {host}\n{more}")


@contextlib.contextmanager
def serving(**config: Any) -> Iterator[LiveServer]:
    with LiveServer(FakeFrontend(), **config) as server:
        yield server


# --- Host -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/live", "/metrics", "/server_info", "/flush_cache", "/health", "/x"])
def test_a_rebound_name_reads_nothing(server: LiveServer, path: str) -> None:
    answer = get(server, f"evil.example:{server.port}", path=path)
    assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
    assert "--allowed-hosts" in answer.error["message"]
    assert MODEL.encode() not in answer.body


def test_a_rebound_name_generates_nothing(server: LiveServer, frontend: FakeFrontend) -> None:
    head = f"POST /generate HTTP/1.1\nhost: evil.example\norigin: http://evil.example\n{_lines(JSON)}"
    assert send(server, head, b'{"text": "hi"}').status == 403
    assert frontend.requests == []


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:1",
        "LocalHost:{port}",
        "localhost.",
        "localhost.:{port}",
        "notebook.localhost",
        "127.0.0.1:{port}",
        "127.8.9.10",
        "[::1]",
        "[::1]:{port}",
    ],
)
def test_loopback_names_are_answered(server: LiveServer, host: str) -> None:
    assert get(server, host.format(port=server.port)).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "EVIL.example.:{port}",
        "localhost.evil.example",
        "evil-localhost",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "evil.example@localhost",
        "localhost:80:90",
        "localhost, evil.example",
        "localhost/",
        "192.168.1.5",
        "0.0.0.0",
        "[::2]",
        "[::1",
        "::1",
        "1270.0.0.1",
        "",
        ".",
        "\xe9",
    ],
)
def test_other_names_are_not(server: LiveServer, host: str) -> None:
    assert get(server, host.format(port=server.port)).status == 403


def test_a_request_names_one_host(server: LiveServer) -> None:
    twice = send(server, "GET /live HTTP/1.1\nhost: localhost\nhost: evil.example")
    never = send(server, "GET /live HTTP/1.0\naccept: */*")
    for answer in (twice, never):
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")


def test_hosts_can_be_allowed() -> None:
    with serving(allowed_hosts="box.lan, *.example.com:80, [fd00::1]") as server:
        for host in ("box.lan", "BOX.LAN.:99", "a.b.example.com", "[fd00::1]:5", "localhost"):
            assert get(server, host).status == 200, host
        for host in ("example.com", "a.box.lan", "evil.example", "[fd00::2]"):
            assert get(server, host).status == 403, host
    with serving(allowed_hosts="*") as server:
        assert get(server, "evil.example").status == 200
        nameless = send(server, f"GET /live HTTP/1.0\norigin: {APP}")
        assert (nameless.status, nameless.error["code"]) == (403, "origin_not_allowed")


def test_a_server_for_other_machines_answers_to_addresses() -> None:
    with serving(host="0.0.0.0", insecure=True) as server:
        for host in ("localhost", "192.168.1.5:80", "[fd00::1]", "0.0.0.0"):
            assert get(server, host).status == 200, host
        assert get(server, "evil.example").status == 403
    with serving(host="box.lan", insecure=True) as server:
        assert get(server, "box.lan:5").status == 200
        assert get(server, "evil.example").status == 403


def test_with_a_key_any_host_is_answered_unless_some_are_named() -> None:
    key = "authorization: Bearer sesame"
    with serving(api_key="sesame") as server:
        assert get(server, "llm.example.com", key).status == 200
    with serving(api_key="sesame", allowed_hosts="llm.example.com") as server:
        assert get(server, "llm.example.com", key).status == 200
        assert get(server, "localhost", key).status == 403


# --- Origin and Sec-Fetch-Site --------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "",
        "http://localhost",
        "http://localhost:1",
        "http://127.0.0.1:{port}",
        "http://localhost:{port}.evil.example",
        "localhost:{port}",
        "http://localhost:{port}\norigin: http://localhost:{port}",
    ],
)
@pytest.mark.parametrize("path", ["/live", "/", "/flush_cache", "/metrics"])
def test_pages_of_other_origins_are_refused(server: LiveServer, origin: str, path: str) -> None:
    answer = get(server, f"localhost:{server.port}", f"origin: {origin.format(port=server.port)}", path)
    assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
    assert "--cors" in answer.error["message"]
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("site", ["cross-site", "same-site", "cross-origin"])
@pytest.mark.parametrize("path", ["/live", "/flush_cache", "/", "/get_server_info"])
def test_what_a_page_loads_from_another_site_is_refused(server: LiveServer, site: str, path: str) -> None:
    for destination in ("empty", "image", "iframe"):
        fetched = f"sec-fetch-site: {site}\nsec-fetch-dest: {destination}"
        assert get(server, "localhost", fetched, path).status == 403


def test_the_user_the_page_itself_and_a_link_to_it_are_answered(server: LiveServer) -> None:
    own = f"localhost:{server.port}"
    assert get(server, own, "sec-fetch-site: none").status == 200
    assert get(server, own, "sec-fetch-site: same-origin").status == 200
    assert get(server, own, f"sec-fetch-site: same-origin\norigin: http://{own}").status == 200
    linked = "sec-fetch-site: cross-site\nsec-fetch-mode: navigate\nsec-fetch-dest: document"
    assert get(server, own, linked, "/").status == 200
    for path in ("/live", "/flush_cache", "/metrics"):
        assert get(server, own, linked, path).status == 403


def test_a_form_of_another_site_changes_nothing(server: LiveServer, frontend: FakeFrontend) -> None:
    form = "content-type: application/x-www-form-urlencoded"
    page = f"host: localhost\norigin: https://evil.example\nsec-fetch-site: cross-site\n{form}"
    for path in ("/generate", "/flush_cache", "/abort_request"):
        assert send(server, f"POST {path} HTTP/1.1\n{page}", b'{"text": "hi", "x": "="}').status == 403
    # A browser without these headers is stopped by the content type.
    old = f"host: localhost\n{form}"
    for path in ("/generate", "/flush_cache", "/abort_request"):
        assert send(server, f"POST {path} HTTP/1.1\n{old}", b'{"text": "hi", "x": "="}').status == 415
    assert frontend.requests == []


def test_with_a_key_the_key_decides() -> None:
    with serving(api_key="sesame") as server:
        page = f"origin: {APP}\nsec-fetch-site: cross-site"
        assert get(server, "localhost", page).status == 401
        answer = get(server, "localhost", f"{page}\nauthorization: Bearer sesame")
        assert answer.status == 200
        assert "access-control-allow-origin" not in answer.headers  # so the browser hides it from the page


# --- CORS -----------------------------------------------------------------------------------------

PREFLIGHT = (
    "OPTIONS /v1/chat/completions HTTP/1.1\nhost: localhost\norigin: {origin}\n"
    "access-control-request-method: POST\naccess-control-request-headers: authorization,content-type"
)


@pytest.mark.parametrize("key", [None, "sesame"])
def test_a_named_origin(key: str | None) -> None:
    with serving(cors=f"{APP}, http://localhost:3000", api_key=key) as server:
        for origin in (APP, "http://localhost:3000"):
            preflight = send(server, PREFLIGHT.format(origin=origin))
            assert preflight.status == 200
            assert preflight.headers["access-control-allow-origin"] == origin
            assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
            assert "POST" in preflight.headers["access-control-allow-methods"]
            assert "Origin" in preflight.headers["vary"]
            page = f"origin: {origin}\nsec-fetch-site: cross-site\nauthorization: Bearer {key}"
            answer = get(server, "localhost", page)
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == origin
            assert answer.headers["vary"] == "Origin"
            failed = get(server, "localhost", page, "/v1/models/x")
            assert (failed.status, failed.headers["access-control-allow-origin"]) == (404, origin)
        evil = "https://evil.example"
        assert send(server, PREFLIGHT.format(origin=evil)).status == (400 if key else 403)
        answer = get(server, "localhost", f"origin: {evil}")
        assert (answer.status, "access-control-allow-origin" in answer.headers) == (
            401 if key else 403,
            False,
        )
        if not key:
            assert get(server, "localhost", "sec-fetch-site: cross-site").status == 403


def test_any_origin() -> None:
    with serving(cors="*") as server:
        for origin in (APP, "null"):
            assert send(server, PREFLIGHT.format(origin=origin)).headers["access-control-allow-origin"] == "*"
            answer = get(server, "localhost", f"origin: {origin}\nsec-fetch-site: cross-site")
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize("key", [None, "sesame"])
def test_without_cors_a_preflight_fails(key: str | None) -> None:
    with serving(api_key=key) as server:
        answer = send(server, PREFLIGHT.format(origin=APP))
        assert answer.status == (401 if key else 403)
        assert "access-control-allow-origin" not in answer.headers


# --- Content-Type ---------------------------------------------------------------------------------


NOT_JSON = (
    None,
    "",
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/plain; application/json",
    "application/jsonx",
    "application/json\ncontent-type: text/plain",
)


@pytest.mark.parametrize("key", [None, "sesame"])
def test_a_body_must_be_json(key: str | None) -> None:
    with serving(api_key=key) as server:
        for path in ("/generate", "/flush_cache", "/v1/chat/completions"):
            head = f"POST {path} HTTP/1.1\nhost: localhost\nauthorization: Bearer {key}"
            for kind in NOT_JSON:
                typed = "" if kind is None else f"\ncontent-type: {kind}"
                answer = send(server, head + typed, b'{"text": "hi"}')
                assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type"), kind
                assert "content-type: application/json" in answer.error["message"]
        assert server.frontend.requests == []


def test_a_body_without_a_length_must_be_json(server: LiveServer) -> None:
    head = "POST /flush_cache HTTP/1.1\nhost: localhost\ntransfer-encoding: chunked"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 415 ")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON;charset=utf-8", "application/x+json"])
def test_json_under_any_of_its_names(http: httpx.Client, kind: str) -> None:
    response = http.post("/generate", content=b'{"text": "hi"}', headers={"content-type": kind})
    assert response.status_code == 200


def test_no_body_needs_no_type(server: LiveServer) -> None:
    assert httpx.post(server.url + "/flush_cache").status_code == 200


def test_clients_pass(server: LiveServer, client: openai.OpenAI) -> None:
    assert client.completions.create(model=MODEL, prompt="hi", max_tokens=2).choices[0].text == "HI"


# --- the API key ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    with LiveServer(FakeFrontend(), api_key="sesame") as server:
        yield server


@pytest.mark.parametrize(
    "header", [None, "sesame", "Bearer", "Bearer wrong", "Basic sesame", "Bearer sesam\xe9"]
)
def test_a_request_without_the_key_is_refused(locked: LiveServer, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    response = httpx.post(locked.url + "/generate", json={"text": "hi"}, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "unauthorized"
    assert response.headers["www-authenticate"] == "Bearer"
    assert locked.frontend.requests == []


def test_a_request_with_the_key_is_accepted(locked: LiveServer) -> None:
    with openai.OpenAI(base_url=locked.url + "/v1", api_key="sesame") as client:
        assert client.completions.create(model=MODEL, prompt="hi", max_tokens=2).choices[0].text == "HI"
    locked.frontend.reset()


def test_a_missing_key_is_told_in_the_terms_of_the_caller(
    locked: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "The API key is missing or wrong. Give the server's key as the variable RAMIFY_ENDPOINT_KEY"
    with contextlib.closing(rm.RuntimeEndpoint(locked.url, api_key="wrong")) as endpoint:
        with pytest.raises(Unauthorized) as refused:
            endpoint.get_server_info()
        assert str(refused.value).startswith(told)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", "--url", locked.url]) == 2
    assert capsys.readouterr().err.startswith("ramify: " + told)


def test_health_is_open_and_the_key_is_not_shown(locked: LiveServer) -> None:
    for path in ("/health", "/livez", "/readyz"):
        assert httpx.get(locked.url + path).status_code == 200
    assert httpx.get(locked.url + "/metrics").status_code == 401
    info = httpx.get(locked.url + "/server_info", headers={"authorization": "Bearer sesame"})
    assert info.status_code == 200
    assert "sesame" not in info.text


def test_metrics_can_be_open() -> None:
    with LiveServer(FakeFrontend(), api_key="sesame", open_metrics=True) as server:
        assert httpx.get(server.url + "/metrics").status_code == 200
        assert httpx.get(server.url + "/server_info").status_code == 401


# --- the configuration, and browsers --------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert ServerConfig(host=host).api_key is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.lan", ""])
def test_other_addresses_need_a_key_or_insecure(host: str) -> None:
    with pytest.raises(ValueError, match="--insecure"):
        ServerConfig(host=host)
    assert ServerConfig(host=host, api_key="sesame").insecure is False
    assert ServerConfig(host=host, insecure=True).api_key is None


def test_refused_requests_are_counted_and_logged(
    server: LiveServer, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    get(server, "evil.example")
    assert "status=403 client=127.0.0.1 GET /live: This server does not answer to the host" in caplog.text
    assert 'ramify_http_responses_total{endpoint="other",status="403"}' in http.get("/metrics").text


def test_hosts_that_clients_make_up_are_not_kept_for_ever() -> None:
    async def app(*_: Any) -> None: ...

    check = RefuseWebPages(app, ServerConfig())._hosts
    assert check is not None
    for number in range(1000):
        assert not check(b"evil%d.example" % number)
    assert check.cache_info().currsize <= 256  # type: ignore[attr-defined]


ATTACK = """<!doctype html><body>waiting<script>
const own = `http://127.0.0.1:${PORT}`, said = [];
const attempts = {
  read: () => fetch(own + "/live").then(answer => answer.text()),
  image: () => new Promise((done, failed) => {
    const image = new Image(); image.onload = done; image.onerror = failed; image.src = own + "/flush_cache";
  }),
  text: () => fetch(own + "/generate", {method: "POST", mode: "no-cors", body: '{"text": "stolen"}'}),
  untyped: () => fetch(own + "/generate",
                       {method: "POST", mode: "no-cors", body: new Blob(['{"text": "stolen"}'])}),
  json: () => fetch(own + "/generate", {
    method: "POST", headers: {"content-type": "application/json"}, body: '{"text": "stolen"}'
  }).then(answer => answer.text()),
};
Promise.all(Object.entries(attempts).map(([name, attempt]) =>
  attempt().then(answer => said.push(name + " " + answer), () => said.push(name + " failed"))
)).then(() => document.body.textContent = said.sort().join(", "));
</script>"""


@needs_browser
@pytest.mark.parametrize("cors", [False, True])
def test_a_page_in_a_browser(tmp_path: Any, cors: bool) -> None:
    """The web page comes from another server: another port, so another origin."""
    site = socket.create_server(("127.0.0.1", 0))
    origin = f"http://127.0.0.1:{site.getsockname()[1]}"
    with site, serving(cors=origin if cors else "") as server:
        page = ATTACK.replace("${PORT}", str(server.port)).encode()
        with _page_server(site, page):
            said = words(rendered(origin, profile=tmp_path))
        texts = [request.prompt for request in server.frontend.requests]
    if cors:
        assert "json {" in said
        assert "read {" in said
        assert texts == [("stolen",)]
    else:
        # Browsers hide the answers to no-cors requests from the page in any case.
        assert "image failed, json failed, read failed" in said
        assert texts == []


@needs_browser
def test_the_dashboard_without_a_key(tmp_path: Any) -> None:
    with serving() as server:
        httpx.post(server.url + "/v1/completions", json={"model": MODEL, "prompt": "hello", "max_tokens": 3})
        said = words(rendered(f"http://localhost:{server.port}/", profile=tmp_path))
    assert "/v1/completions" in said


@contextlib.contextmanager
def _page_server(site: socket.socket, page: bytes) -> Iterator[None]:
    """Answer every request on `site` with `page` until the block ends."""

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = site.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.0 200 OK\r\ncontent-type: text/html\r\n\r\n" + page)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        site.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def _lines(headers: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in headers.items())
