"""A local server with the part of the Hugging Face hub's API that `huggingface_hub` uses to download.

It serves model info, the tree, and HEAD and GET of files, with ranges and the redirect of LFS files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

COMMIT = "c" * 40


@dataclass
class HubServer:
    """`repositories`: name → path → content. `breaks`: path → bytes after which its next download ends."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: dict[str, str] = field(default_factory=dict)
    """Repository → the token that may read it."""
    revisions: tuple[str, ...] = ("main", "v1")
    breaks: dict[str, int] = field(default_factory=dict)
    corrupted: set[str] = field(default_factory=set)
    """Paths of files that are sent with a wrong last byte."""
    asked: list[str] = field(default_factory=list)
    """Method, path and range of each request."""
    url: str = ""


@contextlib.contextmanager
def hub_server() -> Iterator[HubServer]:
    hub = HubServer()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, folder: Path) -> None:
    """Make `huggingface_hub` and Ramify use the hub at `url`, and empty caches in `folder`."""
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    names = {"HF_HUB_CACHE": str(folder / "hub"), "ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": template}
    for name, value in names.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("RAMIFY_HOME", str(folder / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


class _Handler(BaseHTTPRequestHandler):
    state: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, asked_range = self.state, self.headers.get("Range", "")
        hub.asked.append(f"{self.command} {self.path} {asked_range}".strip())
        if found := re.fullmatch(
            r"/api/models/([^?]+?)(?:/revision/([^/?]+))?(?:\?.*)?", self.path.split("/tree/")[0]
        ):
            if "/tree/" in self.path:
                return self._tree(found[1])
            return self._info(found[1], found[2] or "main")
        if found := re.fullmatch(r"/cdn/(.+?/.+?)/(.+)", self.path):
            return self._content(found[1], found[2])
        if found := re.fullmatch(r"/(.+?/.+?)/resolve/([^/]+)/(.+)", self.path):
            return self._resolve(found[1], found[2], found[3])
        return self._refuse(404, "EntryNotFound")

    def _files(self, repository: str, revision: str) -> dict[str, bytes] | None:
        hub = self.state
        if repository not in hub.repositories:
            self._refuse(401, "RepoNotFound")
        elif (
            repository in hub.gated and self.headers.get("Authorization") != f"Bearer {hub.gated[repository]}"
        ):
            self._refuse(401, "GatedRepo")
        elif revision not in (*hub.revisions, COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            return hub.repositories[repository]
        return None

    def _info(self, repository: str, revision: str) -> None:
        files = self._files(repository, revision)
        if files is not None:
            siblings = []
            for path, content in files.items():
                entry = {"rfilename": path, "size": len(content), "blobId": _git(content)}
                if _is_lfs(path):
                    entry["lfs"] = {"sha256": _sha256(content), "size": len(content), "pointerSize": 130}
                siblings.append(entry)
            self._json({"id": repository, "sha": COMMIT, "siblings": siblings})

    def _tree(self, repository: str) -> None:
        files = self._files(repository, COMMIT)
        if files is not None:
            entries = []
            for path, content in files.items():
                entry = {"type": "file", "path": path, "size": len(content), "oid": _git(content)}
                if _is_lfs(path):
                    entry["lfs"] = {"oid": _sha256(content), "size": len(content), "pointerSize": 130}
                entries.append(entry)
            self._json(entries)

    def _resolve(self, repository: str, revision: str, path: str) -> None:
        files = self._files(repository, revision)
        if files is None:
            return None
        if path not in files:
            return self._refuse(404, "EntryNotFound")
        headers = {"X-Repo-Commit": COMMIT}
        if not _is_lfs(path):
            return self._content(repository, path, {**headers, "ETag": f'"{_git(files[path])}"'})
        # Another host, like a content delivery network: the library follows redirects to the hub itself.
        elsewhere = self.state.url.replace("127.0.0.1", "localhost")
        headers |= {"X-Linked-Etag": f'"{_sha256(files[path])}"', "X-Linked-Size": str(len(files[path]))}
        return self._send(302, b"", {**headers, "Location": f"{elsewhere}/cdn/{repository}/{path}"})

    def _content(self, repository: str, path: str, headers: dict[str, str] | None = None) -> None:
        hub, content = self.state, self.state.repositories[repository][path]
        if path in hub.corrupted:
            content = content[:-1] + bytes([content[-1] ^ 1])
        status, more, size = 200, dict(headers or {}), len(content)
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(found[1]), min(int(found[2] or size - 1), size - 1) + 1
            status, content = 206, content[start:stop]
            more["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self._send(status, content, more, hub.breaks.pop(path, None) if self.command == "GET" else None)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, status: int, content: bytes, headers: dict[str, str], broken_at: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        if broken_at is not None:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:broken_at])
        if broken_at is not None:
            self.close_connection = True


def _is_lfs(path: str) -> bool:
    return path.endswith((".gguf", ".safetensors"))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
