"""HTTP byte by byte: upgrades, HTTP/1.0, HEAD, paths, compressed bodies and incomplete bodies."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import zlib
from typing import Any

import httpx
import pytest
import zstandard

from ramify.runtime.server import body as bodies
from ramify.runtime.server.app.connection import Connection
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer

COMPLETION: Any = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
BODY = json.dumps(COMPLETION).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
JAVA = (
    b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
    b"upgrade: h2c\r\n"
)
SIZED = f"content-length: {len(BODY)}\r\n\r\n".encode()
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
CHUNKED += b"a;name=value\r\n%b\r\n%x\r\n%b\r\n" % (BODY[:10], len(BODY) - 10, BODY[10:])
CHUNKED += b"0\r\nsome: trailer\r\n\r\n"


def connect(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def answers(connection: socket.socket, count: int) -> list[tuple[int, dict[str, str], bytes]]:
    """Read `count` responses with content-length; returns (status, headers, body) of each."""
    found = []
    with connection.makefile("rb") as stream:
        for _ in range(count):
            status = int(stream.readline().split()[1])
            headers = {}
            while (line := stream.readline()) != b"\r\n":
                name, _, value = line.decode().partition(": ")
                headers[name] = value.strip()
            found.append((status, headers, stream.read(int(headers.get("content-length", 0)))))
    return found


@pytest.mark.parametrize("body", [SIZED + BODY, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize(
    "offer", [JAVA, JAVA.replace(b"h2c", b"websocket"), JAVA.replace(b"h2c", b"TLS/1.0, foo"), b""]
)
def test_an_offer_to_upgrade_is_not_taken_up_and_the_request_is_answered(
    server: LiveServer, offer: bytes, body: bytes
) -> None:
    request = HEAD + offer + body
    with connect(server) as connection:
        # In one piece, in two that part within the head or within the body, and behind another request.
        for border in (0, 60, len(HEAD + offer) + 12, len(request) - 3):
            connection.sendall(request[:border])
            connection.sendall(request[border:])
            ((status, _, answer),) = answers(connection, 1)
            assert status == 200, answer
            assert json.loads(answer)["choices"][0]["text"] == "HI"
        connection.sendall(request * 2)
        assert [status for status, _, _ in answers(connection, 2)] == [200, 200]


def test_an_offer_without_a_body(server: LiveServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + JAVA + b"\r\n")
        ((status, _, body),) = answers(connection, 1)
    assert (status, json.loads(body)["data"][0]["id"]) == (200, MODEL)


@pytest.mark.parametrize("body", [b"", SIZED + BODY, CHUNKED], ids=["none", "sized", "chunked"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_an_offer_to_upgrade_on_a_connection_that_is_to_close(
    server: LiveServer, version: bytes, body: bytes
) -> None:
    head = HEAD if body else b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
    head = head.replace(b"1.1", version) + b"connection: close, Upgrade\r\nupgrade: h2c\r\n"
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in head + (body or b"\r\n"):
            connection.sendall(bytes([byte]))
        ((status, headers, answer),) = answers(connection, 1)
        assert connection.recv(1) == b""
    assert (status, headers["connection"]) == (200, "close"), answer


@pytest.mark.parametrize("offer", [b"", b"connection: Upgrade\r\nupgrade: h2c\r\n"])
@pytest.mark.parametrize(
    "target", [b"localhost:443", b"/", b"*", b"//foo", b"http://foo/", b"/v1/completions"]
)
def test_connect_is_refused(server: LiveServer, target: bytes, offer: bytes) -> None:
    # A loop over the same head would end in the time limit of the connection.
    with connect(server) as connection:
        connection.sendall(b"CONNECT %b HTTP/1.1\r\nhost: localhost\r\n%b\r\n" % (target, offer))
        ((status, headers, body),) = answers(connection, 1)
        assert connection.recv(1) == b""
    assert (status, headers["connection"]) == (400, "close")
    assert b"CONNECT" in body


def test_expect_continue(server: LiveServer) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD + b"expect: 100-continue\r\n" + SIZED)
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        ((status, _, _),) = answers(connection, 1)
    assert status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_http_1_0_has_no_chunks(server: LiveServer, stream: bool) -> None:
    body = json.dumps(COMPLETION | {"stream": stream}).encode()
    head = HEAD.replace(b"1.1", b"1.0") + f"content-length: {len(body)}\r\n\r\n".encode()
    with connect(server) as connection:
        connection.sendall(head + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    top, _, rest = answer.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in top
    assert b"connection: close" in top
    if stream:
        assert rest.startswith(b"data: {")
        assert rest.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(rest)["choices"][0]["text"] == "HI"


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", f"/v1/models/{MODEL}", "/metrics", "/live"])
def test_head_is_answered_as_get_without_a_body(http: httpx.Client, path: str) -> None:
    got, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert got.content
    assert int(head.headers["content-length"]) > 0
    assert http.head("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    "path", ["/v1/models/", "//v1/models", "/v1//models", "/v1/models//", "/health/", "/v1/completions/"]
)
def test_slashes_around_a_path(http: httpx.Client, server: LiveServer, path: str) -> None:
    path = server.url + path  # httpx reads //v1 as a host
    if "completions" in path:
        assert http.post(path, json=COMPLETION).status_code == 200
    else:
        assert http.get(path).status_code == 200


def test_paths_without_a_key_stay_the_same_ones_with_a_slash() -> None:
    with LiveServer(FakeFrontend(), api_key="k") as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health/").status_code == 200
        assert client.get("/v1/models/").status_code == 401
        assert client.get(server.url + "//v1/models").status_code == 401
        assert client.head("/").status_code == 401


def deflated(body: bytes, window: int) -> bytes:
    stream = zlib.compressobj(wbits=window)
    return stream.compress(body) + stream.flush()


def streamed(body: bytes, window: int) -> bytes:
    """`body` as a zstd frame that does not say its length, with a window of 2**`window` bytes."""
    options = zstandard.ZstdCompressionParameters(window_log=window)
    stream = zstandard.ZstdCompressor(compression_params=options).compressobj()
    return stream.compress(body) + stream.flush()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("zstd", zstandard.compress(BODY)),
        ("zstd", streamed(BODY, 21)),
        ("zstd", zstandard.compress(BODY[:9]) + zstandard.compress(BODY[9:])),
        ("X-GZip", gzip.compress(BODY[:9], mtime=0) + gzip.compress(BODY[9:], mtime=0)),
        ("gzip", gzip.compress(BODY, mtime=0) + gzip.compress(b"", mtime=0) * (bodies.MAX_MEMBERS - 1)),
        ("deflate", deflated(BODY, 15)),
        ("deflate", deflated(BODY, -15)),
        ("identity", BODY),
    ],
)
def test_compressed_bodies(http: httpx.Client, encoding: str, body: bytes) -> None:
    response = http.post("/v1/completions", content=body, headers={"content-encoding": encoding})
    assert response.json()["choices"][0]["text"] == "HI"


@pytest.mark.parametrize(
    ("encoding", "body", "status", "said"),
    [
        ("br", BODY, 415, "gzip, deflate or zstd"),
        ("gzip, gzip", BODY, 415, "gzip, gzip"),
        ("gzip", BODY, 400, "not gzip"),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], 400, "ends in the middle"),
        ("gzip", gzip.compress(b" " * (bodies.MAX_BODY_BYTES + 1)), 413, "more than"),
        ("gzip", gzip.compress(b" " * bodies.MAX_BODY_BYTES, mtime=0), 400, "JSON"),
        ("gzip", gzip.compress(b" " * (bodies.MAX_BODY_BYTES // 2 + 1)) * 2, 413, "more than"),
        ("gzip", gzip.compress(b"", mtime=0) * (bodies.MAX_MEMBERS + 1), 400, "16 gzip members"),
        ("zstd", BODY, 400, "not zstd"),
        ("zstd", zstandard.compress(BODY)[:-3], 400, "ends in the middle"),
        ("zstd", streamed(b" " * (bodies.MAX_BODY_BYTES + 1), 21), 413, "more than"),
        ("zstd", zstandard.compress(b" " * bodies.MAX_BODY_BYTES), 400, "JSON"),
        ("zstd", zstandard.compress(b" " * (bodies.MAX_BODY_BYTES // 2 + 1)) * 2, 413, "more than"),
        ("zstd", zstandard.compress(b"{}") * (bodies.MAX_MEMBERS + 1), 400, "16 zstd members"),
        ("zstd", streamed(BODY, 27), 400, "too much memory"),
    ],
)
def test_bodies_that_cannot_be_inflated(
    http: httpx.Client, encoding: str, body: bytes, status: int, said: str
) -> None:
    response = http.post("/v1/completions", content=body, headers={"content-encoding": encoding})
    assert response.status_code == status, response.text
    assert said in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/replicas/0/drain"])
def test_a_half_sent_body_is_refused_in_time(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(bodies, "BODY_IDLE_S", 0.05)
    with connect(server) as connection:
        connection.sendall((HEAD + SIZED + BODY[:-1]).replace(b"/v1/completions", path.encode()))
        ((status, headers, body),) = answers(connection, 1)
        assert connection.recv(1) == b""  # closed: the rest might come as a request
    assert (status, headers["connection"]) == (408, "close")
    error = json.loads(body)["error"]
    assert error["code"] == "body_timeout"
    assert f"{len(BODY) - 1} bytes" in error["message"]


@pytest.mark.parametrize("sent", [b"", HEAD[:30]])
def test_a_connection_that_owes_no_answer_ends(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    made = Connection.connection_made

    def hurried(self: Connection, transport: asyncio.Transport) -> None:
        self.timeout_keep_alive = 0.05  # type: ignore[assignment]
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", hurried)
    with connect(server) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""
