"""Batches that are computed: each line is a request to the server's own application.

    validating → in_progress → finalizing → completed, or expired
                             → cancelling → cancelled

A batch of which the input, the disk or the code is wrong becomes failed. The results file has a line for each
answer as soon as there is one. So a server that was killed finds which lines are left, and computes these.
While the key of a batch is missing in the file of keys, its lines wait until it is back or the batch expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.types import ASGIApp, Message

from ramify.batches.lines import Lines, Result, check_lines, results_of
from ramify.batches.store import (
    UNFINISHED,
    Batch,
    Counts,
    Errors,
    LineError,
    Status,
    Store,
    StoredFile,
    disk_error,
    new_id,
    whole_file,
)
from ramify.errors import EngineClosed, RamifyError
from ramify.loop import cancel_at_end
from ramify.runtime.config import ServerConfig
from ramify.runtime.host_names import split_names
from ramify.runtime.server.keys.tenants import ACCOUNT, Account, Keys
from ramify.runtime.server.service import IN_BATCH, Service

logger = logging.getLogger("ramify.server")

AT_ONCE = 4
"""Maximum number of batches of a key that are computed at a time. The others wait."""
ATTEMPTS = 3
"""Number of answers 503 of a running engine after which that answer is the result of a line. A request that
kills the engine is answered so; it is not sent again without end."""
PAUSE_S = 1.0
"""Seconds before a line is sent again if the answer names no time."""
ENDED = {
    "expired": ("batch_expired", "The completion window ended before this request was computed."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was computed."),
}
"""Status of a batch → code and message of its lines without an answer."""


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Places:
    """At most `most` places that owners hold at a time. A place that becomes free goes to the owner that
    waits and holds fewest."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """A place of `owner` during the block."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._give()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():
                self._held[owner] -= 1
                self._free += 1
                self._give()

    def _give(self) -> None:
        while self._free and self._waiting:
            owner = min(self._waiting, key=self._held.__getitem__)
            turn = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not turn.cancelled():
                turn.set_result(None)
                self._held[owner] += 1
                self._free -= 1


class Runner:
    """The batches of a store that are being computed, by `app`."""

    def __init__(self, app: ASGIApp, service: Service, keys: Keys, store: Store) -> None:
        self._app, self._service, self._keys, self._store = app, service, keys, store
        self._headers = _headers(service.config)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._computing: dict[str, asyncio.Task[None]] = {}
        """Id of a batch → the task that computes its lines."""
        self._told_missing: set[str] = set()
        """Ids of the batches of which the log says that their key is missing."""
        self._turns: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))
        """Owner → its turns."""
        # A quarter more than a batch of each replica, so that one that ends has a follower in the queue.
        self._lines = service.config.replicas * service.max_running * 5 // 4 + 1
        self._places = Places(self._lines)
        """One place for each line that is computed, of all batches together. A line that is told to come
        again later has none meanwhile."""

    @property
    def busy(self) -> bool:
        """Whether any batch is being computed."""
        return bool(self._tasks)

    def resume(self) -> None:
        """Go on with the batches that an earlier server has not ended."""
        for batch in self._store.batches.values():
            if batch.status in UNFINISHED:
                if batch.served == self._service.model_name:
                    self.start(batch)
                else:
                    logger.warning("%s waits for a server of %r.", batch.id, batch.served)

    def start(self, batch: Batch) -> None:
        task = asyncio.create_task(self._run(batch))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def cancel(self, batch: Batch) -> None:
        """End a batch early. Its lines that have an answer keep it."""
        batch.enter("cancelling")
        await self._store.save(batch)
        if batch.status != "cancelling":
            return  # it has ended meanwhile
        if batch.id in self._computing:
            self._computing[batch.id].cancel()
        elif batch.id not in self._tasks:
            self.start(batch)

    async def aclose(self) -> None:
        """Stop computing. A later server goes on."""
        async with cancel_at_end(list(self._tasks.values())):
            pass

    async def _run(self, batch: Batch) -> None:
        try:
            if batch.status != "validating" or await self._check(batch):
                await self._finish(batch, await self._answered(batch))
        except EngineClosed as error:
            logger.warning("%s stops, and goes on in a later server: %s", batch.id, error)
        except RamifyError as error:
            cause = error.__cause__
            await self._fail(batch, disk_error(cause) if isinstance(cause, OSError) else error)
        except OSError as error:
            await self._fail(batch, disk_error(error))
        except Exception:
            logger.exception("%s failed", batch.id)
            await self._fail(
                batch, RamifyError("An internal error occurred; the server's log has the details.")
            )

    async def _check(self, batch: Batch) -> bool:
        """Check the input file; returns whether the batch goes on."""
        path = self._store.path(batch.input_file_id)
        found = await asyncio.to_thread(check_lines, path, batch.endpoint)
        if batch.cancelling_at is not None:
            return True
        batch.request_counts = Counts(total=found.lines)
        batch.model = found.model
        batch.errors = Errors(found.errors) if found.errors else None
        batch.enter("failed" if found.errors else "in_progress")
        await self._store.save(batch)
        return not found.errors

    async def _answered(self, batch: Batch) -> Status:
        """Compute lines until none is left, or the batch is cancelled or expires; returns how it ends."""
        computing = asyncio.create_task(self._compute(batch))
        self._computing[batch.id] = computing
        try:
            async with cancel_at_end((computing,)):
                if batch.cancelling_at is not None:
                    return "cancelled"
                await asyncio.wait((computing,), timeout=batch.expires_at - time.time())
        finally:
            del self._computing[batch.id]
        if not computing.cancelled():
            computing.result()
            return "completed"
        return "expired" if batch.cancelling_at is None else "cancelled"

    async def _compute(self, batch: Batch) -> None:
        IN_BATCH.set(batch.id)
        async with self._turns[batch.owner], self._opened(batch) as (lines, thread):
            counts = batch.request_counts
            counts.completed, counts.failed = await asyncio.to_thread(_count, self._store.path(batch.id))
            workers = [
                asyncio.create_task(self._work(batch, lines, thread))
                for _ in range(min(self._lines, counts.total))
            ]
            async with cancel_at_end(workers):
                await asyncio.gather(*workers)

    @contextlib.asynccontextmanager
    async def _opened(self, batch: Batch) -> AsyncIterator[tuple[Lines, ThreadPoolExecutor]]:
        """(the lines of a batch, the thread that uses them), closed at the end also if the task is cancelled
        while the thread opens them. A thread of its own, since all workers wait while one looks ahead."""
        thread = ThreadPoolExecutor(1, "ramify-batch")
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(thread, self._lines_of, batch)
        try:
            yield await asyncio.shield(opening), thread
        finally:
            try:
                await loop.run_in_executor(thread, (await opening).close)
            finally:
                thread.shutdown(wait=False)

    def _lines_of(self, batch: Batch) -> Lines:
        path = self._store.path
        return Lines(path(batch.input_file_id), path(batch.id), batch.endpoint)

    async def _work(self, batch: Batch, lines: Lines, thread: ThreadPoolExecutor) -> None:
        in_thread = functools.partial(asyncio.get_running_loop().run_in_executor, thread)
        while (line := await in_thread(lines.take)) is not None:
            answer = await self._answer(batch, functools.partial(in_thread, lines.body, line))
            named = answer.headers.get("request-id") or answer.headers.get("x-request-id")
            result = {
                "id": new_id("batch_req_"),
                "status_code": answer.status,
                "request_id": named or new_id("req_"),
                "body": msgspec.Raw(answer.body),
            }
            await in_thread(lines.write, line, result)
            batch.request_counts.failed += answer.status >= 400
            batch.request_counts.completed += answer.status < 400

    async def _answer(self, batch: Batch, body: Callable[[], Awaitable[bytes]]) -> Answer:
        """The answer to a request. One that is told to come again later does so, and one whose key is missing
        waits for it.

        Raises `EngineClosed` if the engine takes no more requests, since its 503 answers no line.
        """
        refusals = 0
        while True:
            account = self._keys.owner(batch.owner)
            if account is None:
                if batch.id not in self._told_missing:
                    self._told_missing.add(batch.id)
                    logger.warning("%s waits: the API key that made it is not known any more.", batch.id)
                await asyncio.sleep(PAUSE_S)
                continue
            async with self._places.place(batch.owner):
                answer = await post(self._app, batch.endpoint, await body(), self._headers, account)
            if answer.status == 503:
                if self._service.frontend.gave_up or self._service.life.draining:
                    raise EngineClosed("The engine takes no more requests.")
                refusals += 1
            if answer.status not in (429, 503) or refusals == ATTEMPTS:
                return answer
            await asyncio.sleep(float(answer.headers.get("retry-after", PAUSE_S)))

    async def _finish(self, batch: Batch, ending: Status) -> None:
        if batch.status != "cancelling":
            batch.enter("finalizing")
            await self._store.save(batch)
        for file in await asyncio.to_thread(self._write_outputs, batch, ending):
            await self._store.save(file)
        batch.enter(ending)
        await self._store.save(batch)
        self._store.path(batch.id).unlink(missing_ok=True)

    def _write_outputs(self, batch: Batch, ending: Status) -> list[StoredFile]:
        """Make the output file and the error file of the results; returns those that are not empty."""
        counts, usage = Counts(total=batch.request_counts.total), Counter[str]()
        good, bad = (StoredFile(**_output(batch, what)) for what in ("output", "error"))
        results = self._store.path(batch.id)
        with (
            whole_file(self._store.path(good.id)) as output,
            whole_file(self._store.path(bad.id)) as errors,
        ):
            for result in results_of(results):
                counts.failed += result.status_code >= 400
                counts.completed += result.status_code < 400
                (output if result.status_code < 400 else errors).write(result.output())
                usage.update(_usage_of(result))
            if ending in ENDED and batch.in_progress_at is not None:
                code, message = ENDED[ending]
                with contextlib.closing(self._lines_of(batch)) as lines:
                    while (line := lines.take()) is not None:
                        output_line: dict[str, Any] = {
                            "id": new_id("batch_req_"),
                            "custom_id": line.custom_id,
                        }
                        output_line |= {"response": None, "error": {"code": code, "message": message}}
                        errors.write(msgspec.json.encode(output_line) + b"\n")
            good.bytes, bad.bytes = output.tell(), errors.tell()
        for file in (good, bad):
            if not file.bytes:
                self._store.path(file.id).unlink()
        batch.output_file_id = good.id if good.bytes else None
        batch.error_file_id = bad.id if bad.bytes else None
        batch.request_counts = counts
        batch.usage = {
            "input_tokens": usage["input"],
            "input_tokens_details": {"cached_tokens": usage["cached"]},
            "output_tokens": usage["output"],
            "output_tokens_details": {"reasoning_tokens": usage["reasoning"]},
            "total_tokens": usage["input"] + usage["output"],
        }
        return [file for file in (good, bad) if file.bytes]

    async def _fail(self, batch: Batch, error: RamifyError) -> None:
        logger.warning("%s failed: %s", batch.id, error)
        batch.errors = Errors([LineError(error.code, str(error), None, error.field)])
        batch.enter("failed")
        try:
            await self._store.save(batch)
            self._store.path(batch.id).unlink(missing_ok=True)
        except OSError as failure:  # after a restart the batch goes on, in the status that is on the disk
            logger.warning("%s cannot be saved: %s", batch.id, failure)


def _output(batch: Batch, what: str) -> dict[str, Any]:
    """The fields of an output file. Its id follows from the batch's, so that after a crash a new file takes
    the place of the earlier one."""
    digest = hashlib.blake2b(f"{batch.id} {what}".encode(), digest_size=12).hexdigest()
    return {
        "id": f"file-{digest}",
        "bytes": 0,
        "created_at": int(time.time()),
        "filename": f"{batch.id}_{what}.jsonl",
        "purpose": "batch_output",
        "owner": batch.owner,
    }


def _count(results: Path) -> tuple[int, int]:
    """The number of results that are answers, and of those that are errors."""
    failed = [result.status_code >= 400 for result in results_of(results)]
    return len(failed) - sum(failed), sum(failed)


class _Usage(msgspec.Struct):
    """The usage in a body, in the words of chat completions, of the Responses API and of the Messages API."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: dict[str, Any] | None = None
    output_tokens_details: dict[str, Any] | None = None
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class _Used(msgspec.Struct):
    usage: _Usage | None = None


def _usage_of(result: Result) -> dict[str, int]:
    usage = msgspec.json.decode(result.body, type=_Used).usage or _Usage()
    before = usage.prompt_tokens_details or usage.input_tokens_details or {}
    apart = usage.cache_read_input_tokens
    after = usage.completion_tokens_details or usage.output_tokens_details or {}
    return {
        "input": usage.prompt_tokens + usage.input_tokens + apart + usage.cache_creation_input_tokens,
        "cached": before.get("cached_tokens") or apart,
        "output": usage.completion_tokens + usage.output_tokens,
        "reasoning": after.get("reasoning_tokens") or after.get("thinking_tokens") or 0,
    }


def _headers(config: ServerConfig) -> list[tuple[bytes, bytes]]:
    """Headers with which a request passes the server's own checks."""
    named = [name for name in split_names(config.allowed_hosts) if name != "*"]
    host = named[0].replace("*", "batch") if named and config.needs_key else "localhost"
    return [(b"host", host.encode()), (b"content-type", b"application/json")]


async def post(
    app: ASGIApp, path: str, body: bytes, headers: list[tuple[bytes, bytes]], account: Account
) -> Answer:
    """The answer of `app` to a request of `account`, without a connection (ASGI 3.0)."""
    received = False
    status, answered, parts = 0, dict[str, str](), list[bytes]()

    async def receive() -> Message:
        nonlocal received
        if received:
            await asyncio.Event().wait()  # the client stays
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            answered.update({name.decode().lower(): value.decode() for name, value in message["headers"]})
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*headers, (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        ACCOUNT: account,
    }
    await app(scope, receive, send)
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError  # the application has answered its cancellation with 503
    return Answer(status, answered, b"".join(parts))
