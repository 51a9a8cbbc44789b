"""A server that dies at any write, replacement or removal leaves a folder with which the next one goes on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from ramify.batches import lines, route, runner, store
from ramify.runtime.config import ServerConfig
from ramify.runtime.server.keys.tenants import Keys
from ramify.runtime.server.service import Life

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of threads of other tests

INPUT = b"".join(
    b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{"n":%d}}\n' % (n, n) for n in range(4)
)
"""Lines of which those with an odd number are answered with 400."""


KILLED = 9


class Fault:
    """The end of this process, at its change number `place` of a file. The file `note` then names it."""

    def __init__(self, place: int, note: Path) -> None:
        self._left, self._note = place, note
        for name in ("replace", "unlink", "fsync"):
            setattr(os, name, self._dying(name, getattr(os, name)))
        append = self._dying("append", lines.ResultsFile._write)
        lines.ResultsFile._write = append
        opened = Path.open

        def open_file(path: Path, mode: str = "r", *others: Any, **named: Any) -> Any:
            file = opened(path, mode, *others, **named)
            return Written(file, self._change) if mode == "wb" else file

        Path.open = open_file

    def _change(self, change: str) -> None:
        if self._left == 0:
            with open(self._note, "w") as file:
                file.write(change)
            os._exit(KILLED)
        self._left -= 1

    def _dying(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._change(f"{name} {arguments[0]}")
            return function(*arguments, **named)

        return call


class Written:
    """A file that tells each write before it happens, and then writes it at once."""

    def __init__(self, file: Any, change: Callable[[str], None]) -> None:
        self._file, self._change = file, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        self._change("write")
        self._file.write(data)
        self._file.flush()


class Server:
    """The store and the runner of a server whose engine answers the lines of `INPUT`."""

    def __init__(self, folder: Path) -> None:
        self.store = store.Store(folder, 1 << 30)
        frontend = SimpleNamespace(gave_up=False)
        config = ServerConfig()
        self.service: Any = SimpleNamespace(
            config=config, max_running=2, model_name="tiny", life=Life(), frontend=frontend
        )
        self.asked: list[int] = []
        self.hangs = False
        self.runner = runner.Runner(self._answer, self.service, Keys(config), self.store)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        number = json.loads((await receive())["body"])["n"]
        if number == 3 and self.hangs:
            await asyncio.Event().wait()
        self.asked.append(number)
        await send({"type": "http.response.start", "status": 400 if number % 2 else 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"usage": {"prompt_tokens": 1}}'})

    async def upload(self) -> None:
        part = b'--b\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
        form = part % (b"file", b"; filename=f", INPUT) + part % (b"purpose", b"", b"batch") + b"--b--"
        pieces = [form[:200], form[200:]]

        async def receive() -> Any:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        async def opened() -> Any:
            return self.store, self.runner

        state = SimpleNamespace(batch_files=SimpleNamespace(open=opened))
        headers = [(b"content-type", b"multipart/form-data; boundary=b")]
        scope = {"type": "http", "headers": headers, "app": SimpleNamespace(state=state)}
        await route.upload(Request(scope, receive))

    async def finish(self) -> None:
        """Run the batch that is there."""
        for batch in self.store.batches.values():
            if batch.status in store.UNFINISHED:
                await self.runner._run(batch)

    async def cancel(self) -> None:
        """Cancel the batch that is there when its lines are answered, but for the last one."""
        self.hangs = True
        for batch in self.store.batches.values():
            if batch.status in store.UNFINISHED:
                self.runner.start(batch)
                running = self.runner._tasks[batch.id]
                while sum((batch.request_counts.completed, batch.request_counts.failed)) < 3:
                    if running.done():
                        break
                    await asyncio.sleep(0.005)
                if not running.done():
                    await self.runner.cancel(batch)
                await running

    async def remove(self) -> None:
        await self.store.remove(next(iter(self.store.files.values())))


def _change_of_death(folder: Path, place: int, action: Callable[[Server], Coroutine[Any, Any, None]]) -> str:
    """Do `action` in a process that dies at its change number `place`; returns the name of that change, "" if
    `action` ends before."""
    note = folder.with_suffix(".change")
    process = os.fork()
    if process == 0:
        try:
            server = Server(folder)
            Fault(place, note)
            asyncio.run(action(server))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, KILLED)
    return note.read_text() if status == KILLED else ""


def _followers(
    tmp_path: Path, prepare: Callable[[Path], None], action: Callable[[Server], Coroutine[Any, Any, None]]
) -> Iterator[tuple[Server, str]]:
    """(a server that follows a killed one, the change at which that died) for each change of a file in
    `action`. The last `action` ends without a fault."""
    for place in itertools.count():
        folder = tmp_path / str(place)
        prepare(folder)
        change = _change_of_death(folder, place, action)
        following = Server(folder)
        with contextlib.closing(following.store):
            _check_folder(following.store, change)
            yield following, change
            _check_folder(following.store, change)
        if not change:
            break
    assert place > 1, "The fault reaches no change."


def _check_folder(kept: store.Store, change: str) -> None:
    """Fail unless each name in the folder is that of something known, and each file is whole."""
    names = {"lock"} | {f"{one}.json" for one in (*kept.files, *kept.batches)}
    for identity, file in kept.files.items():
        assert kept.path(identity).stat().st_size == file.bytes, change
        names.add(f"{identity}.jsonl")
    unfinished = {f"{one.id}.jsonl" for one in kept.batches.values() if one.status in store.UNFINISHED}
    found = {path.name for path in kept.folder.iterdir()}
    assert names <= found <= names | unfinished, change


def _with_file(folder: Path) -> None:
    server = Server(folder)
    asyncio.run(server.upload())
    server.store.close()


def _with_batch(folder: Path) -> None:
    _with_file(folder)
    server = Server(folder)
    now = int(time.time())
    batch = store.Batch(
        id=store.new_id("batch_"),
        endpoint="/v1/completions",
        input_file_id=next(iter(server.store.files)),
        completion_window="1h",
        created_at=now,
        expires_at=now + 3600,
        owner="",
        served="tiny",
    )
    asyncio.run(server.store.save(batch))
    server.store.close()


def test_upload(tmp_path: Path) -> None:
    for following, change in _followers(tmp_path, lambda _: None, Server.upload):
        for identity in following.store.files:
            assert following.store.path(identity).read_bytes() == INPUT, change
        asyncio.run(following.upload())
    assert len(following.store.files) == 2


def test_remove(tmp_path: Path) -> None:
    for following, change in _followers(tmp_path, _with_file, Server.remove):
        if following.store.files:
            asyncio.run(following.remove())
        assert not following.store.files, change


@pytest.mark.parametrize(
    ("action", "status"),
    [(Server.finish, "completed"), (Server.cancel, "cancelled")],
    ids=["finish", "cancel"],
)
def test_end_of_a_batch(
    tmp_path: Path,
    action: Callable[[Server], Coroutine[Any, Any, None]],
    status: str,
) -> None:
    for following, change in _followers(tmp_path, _with_batch, action):
        (batch,) = following.store.batches.values()
        asyncio.run(action(following))
        assert batch.status == status, change
        assert None not in (batch.output_file_id, batch.error_file_id), change
        found = []
        for identity in (batch.output_file_id, batch.error_file_id):
            text = following.store.path(identity).read_text()
            found += [json.loads(one)["custom_id"] for one in text.splitlines()]
        assert sorted(found) == list("0123"), change
        assert len(following.store.files) == 3, change
