"""Where a server is, and how connections to it are opened: TCP, TLS, the environment's proxy."""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import ssl
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi

from ramify.errors import BackendError, InvalidRequest
from ramify.lang.backends.connection import BrokenAnswer, Connection

CONNECT_S = 10.0
PORTS = {"http": 80, "https": 443}


class Origin:
    """The server that a base URL names.

    Args:
        url: ``http://`` or ``https://``, where all paths lie below it.
        verify: TLS verification: False, or the path of a CA bundle. True takes the bundle of
            ``SSL_CERT_FILE`` or ``SSL_CERT_DIR``, else Mozilla's.

    Raises `InvalidRequest` where `url` is no such URL.
    """

    def __init__(self, url: str, verify: str | bool = True) -> None:
        self._url = _split(url, "base_url")
        self._verify = verify
        self._secure = self._url.scheme == "https"
        self._address = _address(self._url)

    @functools.cached_property
    def target(self) -> str:
        """What a request line has before the path."""
        path = self._url.path.rstrip("/")
        return path if self._proxy is None or self._secure else f"http://{self._host}{path}"

    @functools.cached_property
    def headers(self) -> dict[str, str]:
        """What every request to it needs."""
        found = {"host": self._host}
        if (login := _login(self._url)) is not None:
            found["authorization"] = login
        if self._proxy is not None and not self._secure and (login := _login(self._proxy)) is not None:
            found["proxy-authorization"] = login
        return found

    async def connect(self) -> Connection:
        """A new connection. Raises OSError or `BrokenAnswer`."""
        try:
            async with asyncio.timeout(CONNECT_S):
                return await self._connect()
        except TimeoutError:
            raise BrokenAnswer(f"no connection within {CONNECT_S:g} s") from None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self._proxy is None:
            tls = self._tls if self._secure else None
            _, connection = await loop.create_connection(Connection, *self._address, ssl=tls)
            return connection
        _, connection = await loop.create_connection(Connection, *_address(self._proxy))
        if self._secure:
            try:
                await self._tunnel(connection)
            except BaseException:
                connection.close()
                raise
        return connection

    async def _tunnel(self, connection: Connection) -> None:
        """Have the proxy connect to the server, and begin TLS there (RFC 9110, section 9.3.6)."""
        assert self._proxy is not None
        host, port = self._address
        there = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {there} HTTP/1.1", f"host: {there}"]
        if (login := _login(self._proxy)) is not None:
            lines.append(f"proxy-authorization: {login}")
        connection.send("\r\n".join((*lines, "", "")).encode("latin-1"))
        await connection.head(None)
        if connection.status != 200:
            raise BrokenAnswer(f"the proxy answered {connection.status}")
        loop = asyncio.get_running_loop()
        secured = await loop.start_tls(connection.transport, connection, self._tls, server_hostname=host)
        assert secured is not None
        connection.transport = secured

    @functools.cached_property
    def _host(self) -> str:
        return self._url.netloc.rpartition("@")[2]

    @functools.cached_property
    def _proxy(self) -> SplitResult | None:
        """HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, or the system's settings."""
        if proxy_bypass(self._host):
            return None
        proxies = getproxies()
        found = proxies.get(self._url.scheme) or proxies.get("all")
        if not found:
            return None
        proxy = _split(found if "://" in found else f"http://{found}", "proxy")
        if proxy.scheme != "http":
            raise BackendError(
                f"The proxy {proxy.hostname} is to be reached by {proxy.scheme}.",
                remedy="Name one with http://, or name the server in NO_PROXY.",
            )
        return proxy

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        file: str | None = None
        folder: str | None = None
        if isinstance(self._verify, str):
            file = self._verify
        else:
            file, folder = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
            if not file and not folder:
                file = certifi.where()
        context = ssl.create_default_context(cafile=file, capath=folder)
        if not self._verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def _split(url: str, field: str) -> SplitResult:
    """The parts of a URL that can be connected to."""
    try:
        parts = urlsplit(url)
        known = parts.port is not None or parts.scheme in PORTS
    except ValueError:
        known = False
    if not known or not parts.hostname or (field == "base_url" and parts.scheme not in PORTS):
        raise InvalidRequest(
            f"{url!r} is not a URL of a server.", field=field, remedy="It begins with http:// or https://."
        )
    return parts


def _address(url: SplitResult) -> tuple[str, int]:
    assert url.hostname is not None
    return url.hostname, url.port or PORTS[url.scheme]


def _login(url: SplitResult) -> str | None:
    """Name and password in a URL, as a header (RFC 7617)."""
    if url.username is None:
        return None
    login = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return f"Basic {base64.b64encode(login.encode()).decode()}"
