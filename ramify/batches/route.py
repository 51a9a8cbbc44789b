"""OpenAI's ``/v1/files`` and ``/v1/batches``: requests from a file, computed when there is room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ramify import cache
from ramify.batches.runner import Runner
from ramify.batches.store import (
    UNFINISHED,
    Batch,
    Store,
    StoredFile,
    disk_error,
    fair_room,
    new_id,
    whole_file,
)
from ramify.batches.upload import form_bytes, read_form
from ramify.errors import EngineClosed, EngineError, InvalidRequest, NotFound, UnsupportedField
from ramify.runtime.server.errors import methods_of
from ramify.runtime.server.fields import Fields, json_response, page_limit, page_of
from ramify.runtime.server.openai.responses.endpoint import take_metadata
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import KEY, Service
from ramify.runtime.server.tables.batches import BATCH_FIELDS
from ramify.spelling import check_word

logger = logging.getLogger("ramify.server")

FILES, BATCHES = "/v1/files", "/v1/batches"
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/decisions",
    "/v1/systemone",
    "/v1/rerank",
    "/v1/score",
)
"""Endpoints of which a batch can be, if the server has them."""
WINDOW_S = {"m": 60, "h": 3600, "d": 86400}
LONGEST_WINDOW_S = 30 * 86400
MAX_UNFINISHED = 1000
"""Maximum number of batches that have not ended, of all keys together."""
MOST_FILES, MOST_BATCHES = 10_000, 100
"""Maximum number of files and of batches in one answer (OpenAI's limits). By default it has 10,000 and 20."""


class BatchFiles:
    """The store of a server and its runner, opened when they are first needed."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._service: Service = app.state.service
        config = self._service.config
        default = cache.home() / "batches" / str(config.port)
        self._folder = Path(config.batch_dir).expanduser() if config.batch_dir else default
        self._on = config.batch_gb > 0
        self._store: Store | None = None
        self._runner: Runner | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> tuple[Store, Runner]:
        """Open the folder, and go on with the batches in it. Raises `NotFound` if batch files are off."""
        if not self._on:
            raise NotFound("Batch files are off.", remedy="Start the server with --batch-gb above 0.")
        async with self._opening:
            if self._service.life.draining:
                raise EngineClosed("The server is shutting down.", remedy="Send the request to another one.")
            if self._store is None or self._runner is None:
                config = self._service.config
                most_bytes = int(config.batch_gb * 2**30)
                try:
                    self._store = await asyncio.to_thread(Store, self._folder, most_bytes)
                except OSError as error:
                    raise disk_error(error) from None
                self._runner = Runner(self._app, self._service, self._app.state.keys, self._store)
                self._runner.resume()
            return self._store, self._runner

    async def resume(self) -> None:
        """Go on with the batches that an earlier server has left. If there are none, close the folder again,
        so that another server can use it until a request opens it here."""
        if self._on and self._folder.is_dir():
            try:
                store, runner = await self.open()
            except EngineError as error:
                logger.warning("Batches are not continued: %s", error)
                return
            if not runner.busy:
                store.close()
                self._store = None

    async def aclose(self) -> None:
        """Stop computing, and leave the folder to the next server. No request can open it again."""
        self._service.life.draining = True
        async with self._opening:
            if self._runner is not None:
                await self._runner.aclose()
            if self._store is not None:
                self._store.close()


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    app.state.batch_files = files = BatchFiles(app)
    await files.resume()
    try:
        yield
    finally:
        await files.aclose()


router = Router(lifespan=_lifespan)


async def _opened(request: Request) -> tuple[Store, Runner]:
    files: BatchFiles = request.app.state.batch_files
    return await files.open()


@router.post(FILES, uses_model=False, any_key=True)
async def upload(request: Request) -> Response:
    store, _ = await _opened(request)
    async with store.room(form_bytes(request)):
        try:
            file = await _stored(request, store)
        except OSError as error:
            raise disk_error(error) from None
    return json_response(_shown(file))


async def _stored(request: Request, store: Store) -> StoredFile:
    identity = new_id("file-")
    with whole_file(store.path(identity)) as content:
        form = await read_form(request, content)
        purpose = form.fields["purpose"].decode(errors="replace")
        check_word("purpose", purpose[:100], ("batch",))
        size = content.tell()
    file = StoredFile(
        id=identity,
        bytes=size,
        created_at=int(time.time()),
        filename=form.filename or "batch.jsonl",
        purpose="batch",
        owner=KEY.get().account.owner,
    )
    try:
        await store.save(file)
    except BaseException:
        store.path(identity).unlink(missing_ok=True)
        raise
    return file


@router.get(FILES, any_key=True)
async def list_files(request: Request) -> Response:
    store, _ = await _opened(request)
    purpose, order = request.query_params.get("purpose"), request.query_params.get("order", "desc")
    check_word("order", order[:100], ("asc", "desc"))
    found = [file for file in store.own(StoredFile) if purpose in (None, file.purpose)]
    return _page(
        request, found if order == "desc" else found[::-1], MOST_FILES, MOST_FILES, ("purpose", "order")
    )


@router.get(FILES + "/{identity}", any_key=True)
async def get_file(request: Request, identity: str) -> Response:
    return json_response(_shown((await _opened(request))[0].get(StoredFile, identity)))


@router.get(FILES + "/{identity}/content", any_key=True)
async def get_content(request: Request, identity: str) -> Response:
    store, _ = await _opened(request)
    file = store.get(StoredFile, identity)
    return FileResponse(
        store.path(file.id), media_type="application/octet-stream", filename=f"{file.id}.jsonl"
    )


@router.delete(FILES + "/{identity}", any_key=True)
async def delete_file(request: Request, identity: str) -> Response:
    store, _ = await _opened(request)
    await store.remove(store.get(StoredFile, identity))
    return json_response({"id": identity, "object": "file", "deleted": True})


@router.post(BATCHES, uses_model=False, any_key=True)
async def create_batch(request: Request) -> Response:
    store, runner = await _opened(request)

    def parse(service: Service, fields: Fields) -> tuple[str, str, str, dict[str, str]]:
        """(the id of the input file, the endpoint, the completion window, the metadata)."""
        file_id: str = fields.need("input_file_id")
        endpoint: str = fields.need("endpoint")
        check_word("endpoint", endpoint[:100], _served(request.app))
        window: str = fields.need("completion_window")
        _seconds(window)
        metadata = take_metadata(fields)
        fields.finish(BATCH_FIELDS.whole)
        return file_id, endpoint, window, metadata

    (file_id, endpoint, window, metadata), _ = await parse_body(request, BATCH_FIELDS, parse)
    file = store.get(StoredFile, file_id)
    if file.purpose != "batch":
        raise InvalidRequest(
            f"{file.id} is the output of a batch.",
            field="input_file_id",
            remedy="Upload it as an input file.",
        )
    unfinished = Counter([batch.owner for batch in store.batches.values() if batch.status in UNFINISHED])
    if not fair_room(unfinished, 1, MAX_UNFINISHED):
        own = f"; {unfinished[file.owner]} are of this key" if file.owner else ""
        raise InvalidRequest(
            f"{unfinished.total()} batches have not ended{own}.", remedy="Wait, or cancel one."
        )
    now = int(time.time())
    batch = Batch(
        id=new_id("batch_"),
        endpoint=endpoint,
        input_file_id=file.id,
        completion_window=window,
        created_at=now,
        expires_at=now + _seconds(window),
        metadata=metadata or None,
        owner=KEY.get().account.owner,
        served=Service.serving(request).model_name,
    )
    try:
        async with store.room(0):
            await store.save(batch)
    except OSError as error:
        raise disk_error(error) from None
    runner.start(batch)
    return json_response(_shown(batch))


@router.get(BATCHES, any_key=True)
async def list_batches(request: Request) -> Response:
    return _page(request, (await _opened(request))[0].own(Batch), 20, MOST_BATCHES)


@router.get(BATCHES + "/{identity}", any_key=True)
async def get_batch(request: Request, identity: str) -> Response:
    return json_response(_shown((await _opened(request))[0].get(Batch, identity)))


@router.post(BATCHES + "/{identity}/cancel", uses_model=False, any_key=True)
async def cancel_batch(request: Request, identity: str) -> Response:
    store, runner = await _opened(request)
    batch = store.get(Batch, identity)
    if batch.status not in UNFINISHED:
        raise InvalidRequest(f"{batch.id} is {batch.status}.", field="id")
    if batch.status not in ("cancelling", "finalizing"):
        await runner.cancel(batch)
    return json_response(_shown(batch))


def _served(app: Starlette) -> list[str]:
    return [path for path in ENDPOINTS if "POST" in methods_of(app, path)]


def _seconds(window: str) -> int:
    found = re.fullmatch(r"(\d{1,6})([mhd])", window, re.ASCII)
    seconds = int(found[1]) * WINDOW_S[found[2]] if found else 0
    if not 0 < seconds <= LONGEST_WINDOW_S:
        raise InvalidRequest(
            f"completion_window is {window[:100]!r}.",
            field="completion_window",
            remedy='Give "24h", or other minutes (m), hours (h) or days (d), up to "30d".',
        )
    return seconds


def _shown(what: StoredFile | Batch) -> dict[str, Any]:
    """A file or batch as clients see it."""
    return {
        name: value for name, value in msgspec.structs.asdict(what).items() if name not in ("owner", "served")
    }


def _page(
    request: Request,
    found: Iterable[StoredFile | Batch],
    default: int,
    most: int,
    others: Iterable[str] = (),
) -> Response:
    """The objects behind the one that the query's ``after`` names, at most ``limit``. `others`: names of
    further parameters."""
    query = request.query_params
    for name in query:
        if name not in ("after", "limit", *others):
            raise UnsupportedField(f"{name} is not a parameter of this request.", field=name)
    limit = page_limit(query.get("limit"), default, most)
    return json_response(page_of(list(found), _shown, query.get("after"), limit))
