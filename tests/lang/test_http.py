"""The HTTP client of the backends: kept and lost connections, cancellation, TLS, proxies, bad answers."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import ramify as rm
from ramify.errors import BackendError, InvalidRequest, RequestTimeout
from ramify.lang.backends import http
from ramify.lang.backends.http import Event, HttpClient
from ramify.loop import wait
from ramify.unreachable import unreachable
from tests.lang.remote import RawServer, ScriptedFrontend
from tests.server.fake_frontend import LiveServer

CERTIFICATE = Path(__file__).parent / "localhost.pem"
"""Certificate of localhost and 127.0.0.1, self-signed until 2120, with its key."""


def whole(body: bytes, headers: str = "") -> bytes:
    """An answer that leaves the connection open."""
    return f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


def chunked(*parts: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def on_client(url: str, use: Callable[[HttpClient], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    """Result of `use` on the background loop, where connections are kept."""

    async def run() -> Any:
        client = HttpClient(url, **options)
        try:
            return await use(client)
        finally:
            await client.aclose()

    return wait(run())


class Lettered(Event, frozen=True, kw_only=True):
    a: Any = None


async def events_of(client: HttpClient) -> list[Any]:
    return [event.a async for event in client.events("/", {}, Lettered)]


def test_calls_that_follow_each_other_use_one_connection():
    async def use(client: HttpClient) -> None:
        for number in range(4):
            assert await client.get("/") == {"n": number}
            assert await events_of(client) == ["\u2028"]

    numbers = iter(range(4))
    stream = chunked(b'data: {"a": "\xe2\x80', b'\xa8"}\n', b"\ndata: [DONE]\n\n")

    def reply(target: str) -> bytes:
        return stream if server.heads[-1].startswith("POST") else whole(b'{"n": %d}' % next(numbers))

    with RawServer(reply, keeps=True) as server:
        on_client(server.url, use)
        assert server.closed.acquire(timeout=10)  # by aclose
    assert server.connections == 1
    assert len(server.heads) == 8


def test_a_request_on_a_connection_that_was_closed_meanwhile_is_sent_again():
    answers = iter([whole(b"1"), None, whole(b"2"), None, whole(b"3")])

    async def use(client: HttpClient) -> list[int]:
        return [await client.post("/", {"n": number}) for number in range(3)]

    with RawServer(lambda target: next(answers), keeps=True) as server:
        assert on_client(server.url, use) == [1, 2, 3]
    assert [body["n"] for body in server.bodies] == [0, 1, 1, 2, 2]
    assert server.connections == 3


def test_a_lost_server_is_an_error_until_it_is_back():
    answers = iter([whole(b"1"), None, None, whole(b"2")])

    async def use(client: HttpClient) -> int:
        assert await client.get("/") == 1
        # The kept connection closes without an answer, and so does the new one: that is no accident.
        with pytest.raises(BackendError, match="Server disconnected"):
            await client.get("/")
        return await client.get("/")

    with RawServer(lambda target: next(answers), keeps=True) as server:
        assert on_client(server.url, use) == 2
    assert server.connections == 3


def test_a_stream_that_is_given_up_closes_its_connection():
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    begun = head + b'b\r\ndata: {"a":\r\n7\r\n 1}\n\n\n\r\n'

    async def use(client: HttpClient) -> None:
        async with aclosing(client.events("/", {}, Lettered)) as events:
            async for event in events:
                assert event.a == 1
                break

    with RawServer(lambda target: begun, keeps=True) as server:
        on_client(server.url, use)
        assert server.closed.acquire(timeout=10)


def test_silence_ends_at_the_time_limit():
    async def use(client: HttpClient) -> None:
        with pytest.raises(RequestTimeout, match="did not answer in time"):
            await client.get("/")

    with RawServer(lambda target: b"HTTP/1.1 200 OK\r\n", keeps=True) as server:
        on_client(server.url, use, timeout_s=0.05)
        assert server.closed.acquire(timeout=10)


def test_the_last_bytes_of_a_stream_are_not_waited_for(monkeypatch):
    """A connection without the end of its answer is closed soon, and the program does not wait for it."""
    monkeypatch.setattr(http, "LAST_BYTES_S", 0.05)
    unended = chunked(b"data: [DONE]\n\n").removesuffix(b"0\r\n\r\n")

    async def use(client: HttpClient) -> None:
        assert await events_of(client) == []

    with RawServer(lambda target: unended, keeps=True) as server:
        client = HttpClient(server.url)
        wait(use(client))
        assert server.closed.acquire(timeout=10)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"\x16\x03\x01\x02\x00", "something that is not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n12", "closed the connection in the middle"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "something that is not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20000, "not HTTP: Too many headers"),
        (b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", "answered 101"),
        (b"HTTP/1.1 307 Elsewhere\r\nlocation: /there\r\ncontent-length: 0\r\n\r\n", "answered 307"),
        (whole(b"data: {}\n"), "broke off"),
        (whole(b"data: 3\n"), "answered something else"),
        (whole(b"data: {\n"), "answered something else"),
        (whole(b'data: "\xff"\n'), "answered something else"),
    ],
)
def test_bad_answers_are_backend_errors(reply, message):
    async def use(client: HttpClient) -> None:
        with pytest.raises(BackendError, match=message):
            await events_of(client)

    with RawServer(lambda target: reply) as server:
        on_client(server.url, use)


def test_interim_answers_pipelined_bytes_and_old_versions_are_handled():
    replies = [
        b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + whole(b"1"),
        whole(b"2", "connection: close\r\n"),
        whole(b"3") + whole(b"an answer that nobody has asked for"),
        chunked(b"4"),
    ]

    async def use(client: HttpClient) -> list[Any]:
        return [await client.get("/x") for _ in replies]

    answers = iter(replies)
    with RawServer(lambda target: next(answers), keeps=True) as server:
        assert on_client(server.url, use) == [1, 2, 3, 4]
    assert server.connections == 3
    with RawServer(lambda target: b"HTTP/1.0 200 OK\r\n\r\n5") as server:
        assert on_client(server.url, use) == [5] * 4


def test_tls_is_verified():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)

    async def use(client: HttpClient) -> Any:
        return [await client.get("/a"), await client.get("/b")]

    with RawServer(lambda target: whole(b'"%s"' % target.encode()), keeps=True, tls=context) as server:
        for verify in (str(CERTIFICATE), False):
            assert on_client(server.url, use, verify=verify) == ["/a", "/b"]
        with pytest.raises(BackendError, match="certificate verify failed"):
            on_client(server.url, use)
    assert server.connections == 2


def test_a_login_in_the_url_is_sent_and_not_shown():
    async def use(client: HttpClient) -> Any:
        return await client.get("/x")

    with (
        RawServer(lambda target: whole(b"no JSON"), keeps=True) as server,
        pytest.raises(BackendError, match=f"^{server.url}/x did not answer in JSON"),
    ):
        on_client(server.url.replace("//", "//me:s%40cret@"), use)
    assert "authorization: Basic bWU6c0BjcmV0\r\n" in server.heads[0]


def test_a_proxy_is_asked(monkeypatch):
    async def use(client: HttpClient) -> Any:
        return await client.get("/x")

    with RawServer(lambda target: whole(b"1"), keeps=True) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:secret@"))
        assert on_client("http://nowhere.invalid:81/v1", use) == 1
        monkeypatch.setenv("no_proxy", "nowhere.invalid")
        with pytest.raises(BackendError, match="cannot be reached"):
            on_client("http://nowhere.invalid:81/v1", use)
    (head,) = proxy.heads
    assert head.startswith("GET http://nowhere.invalid:81/v1/x HTTP/1.1\r\n")
    assert "host: nowhere.invalid:81\r\n" in head.lower()
    assert "Proxy-Authorization: Basic bWU6c2VjcmV0\r\n" in head
    with RawServer(lambda target: b"HTTP/1.1 403 No\r\n\r\n") as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        with pytest.raises(
            BackendError,
            match=r"the proxy 127\.0\.0\.1 answered 403\. Correct .* elsewhere\.invalid in NO_PROXY",
        ):
            on_client("https://elsewhere.invalid", use)
    assert proxy.heads[0].startswith("CONNECT elsewhere.invalid:443 HTTP/1.1\r\n")


def test_a_connection_that_fails_names_the_address_and_the_remedy(monkeypatch):
    async def use(client: HttpClient) -> Any:
        return await client.get("/x")

    def said(url: str) -> str:
        with pytest.raises(BackendError) as raised:
            on_client(url, use)
        return str(raised.value)

    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    assert said(url) == (
        f"{url}/x cannot be reached: 127.0.0.1:{port} refuses connections. "
        f"Start the server (`ramify serve --port {port}`), or correct the address."
    )
    assert said("http://nowhere.invalid:81").startswith(
        "http://nowhere.invalid:81/x cannot be reached: nowhere.invalid has no address: "
    )
    with LiveServer(ScriptedFrontend([])) as server:
        secure = server.url.replace("http:", "https:")
        assert said(secure).endswith(" does not speak TLS. Write http:// in place of https://.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    with RawServer(lambda target: whole(b"1"), tls=context) as server:
        assert "certificate verify failed" in said(server.url)
        assert said(server.url).endswith("in SSL_CERT_FILE.")
        assert said(server.url.replace("https:", "http:")).endswith("if it speaks TLS, write https://.")
    monkeypatch.setenv("http_proxy", url)
    assert said("http://elsewhere.invalid").endswith(
        f": the proxy 127.0.0.1:{port} refuses connections. Correct HTTP_PROXY, or name "
        "elsewhere.invalid in NO_PROXY."
    )


def test_a_connection_that_takes_too_long():
    message, remedy = unreachable("https://x.invalid", aiohttp.ConnectionTimeoutError("slow"))
    assert message == "https://x.invalid cannot be reached: x.invalid:443 does not answer."
    assert "firewall" in remedy
    _, remedy = unreachable("https://x.invalid", ConnectionRefusedError())
    assert remedy == "Start the server there, or correct the address."


@pytest.mark.parametrize(
    ("error", "before", "said"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), KeyError("a"), "Connection reset by peer"),
        (ConnectionRefusedError(), socket.gaierror(-2, "unknown"), "x.invalid:80 refuses connections"),
        (aiohttp.ClientError("closed"), None, "closed"),
    ],
)
def test_the_last_failure_is_named_and_not_one_before_it(error, before, said):
    error.__context__ = before
    assert unreachable("http://x.invalid", error)[0] == f"http://x.invalid cannot be reached: {said}."


@pytest.mark.parametrize("proxy", ["proxy:port", "http://me:secret@proxy:abc", "http://", "proxy:0"])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
def test_a_wrong_proxy_is_refused_by_the_name_of_its_variable(variable, proxy, monkeypatch):
    monkeypatch.setenv(variable, proxy)
    with pytest.raises(InvalidRequest, match=rf"^{variable} is .*elsewhere\.invalid in NO_PROXY") as raised:
        HttpClient("http://elsewhere.invalid")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["socks5", "https"])
def test_a_proxy_of_another_kind_is_refused(scheme, monkeypatch):
    monkeypatch.setenv("all_proxy", f"{scheme}://127.0.0.1:1")
    with pytest.raises(BackendError, match=f"is to be reached by {scheme}.*NO_PROXY"):
        HttpClient("http://elsewhere.invalid")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port", "http://[::1"])
def test_bad_urls_are_refused(url):
    with pytest.raises(InvalidRequest, match="is not a URL of a server"):
        rm.get_server_info(rm.RuntimeEndpoint(url))


def test_a_key_that_no_header_can_hold_is_refused():
    with pytest.raises(InvalidRequest, match="API key"):
        HttpClient("http://x", "a\r\nhost: y")


NOBODY_CLOSES = """
import asyncio, gc, os, sys, warnings
import ramify as rm
from ramify.lang.backends.http import Event, HttpClient
from ramify.loop import wait

@rm.function
def ask(s):
    s += "Q:" + rm.gen("x")

@rm.function
async def ask_async(s):
    s += "Q:" + rm.gen("x")
    return await s.aget("x")

how, url = sys.argv[1:]
backend = rm.RuntimeEndpoint(url)
if how == "exit":
    print(ask.run(backend=backend)["x"])
elif how == "collected":
    print(ask.run(backend=backend)["x"])
    del backend
    gc.collect()
elif how == "stream":
    print(next(ask.run(backend=backend, stream=True).text_iter("x")))
elif how == "loops":
    for _ in range(2):
        print(asyncio.run(ask_async.run(backend=backend)).ret_value)
elif how == "own loop":
    async def get():
        print((await client.get("/get_model_info"))["model_path"])
    client = HttpClient(url)
    for _ in range(2):
        asyncio.run(get())
elif how == "fork":
    warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on of every fork beside threads
    print(ask.run(backend=backend)["x"], flush=True)
    child = os.fork()
    if child == 0:
        print(ask.run(backend=backend)["x"])
        del backend
        gc.collect()
        wait(asyncio.sleep(0.1))  # the session is closed by the loop's thread
        sys.exit()
    os.waitpid(child, 0)
    print(ask.run(backend=backend)["x"])
"""


@pytest.mark.parametrize("how", ["exit", "collected", "stream", "loops", "own loop", "fork"])
def test_an_unclosed_client_writes_nothing_to_standard_error(how):
    if how == "fork" and not hasattr(os, "fork"):
        pytest.skip("needs fork")
    expected = {"loops": "one\none\n", "own loop": "\n\n", "fork": "one\none\none\n"}
    with LiveServer(ScriptedFrontend(lambda request: "one")) as server:
        command = [sys.executable, "-X", "dev", "-W", "error", "-c", NOBODY_CLOSES, how, server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == expected.get(how, "one\n")
