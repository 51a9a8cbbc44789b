"""A Ramify server over HTTP.

Requests and answers are the messages of `ramify.messages`. A prompt is a list of segments, so that text which
the model generated is sent back as the token ids that were sampled.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, cast
from urllib.parse import quote

import msgspec

from ramify.answers import AnswerStore
from ramify.credentials import endpoint_key, without_credentials
from ramify.errors import BackendError, InvalidRequest, RamifyError, UnsupportedField, UnsupportedNode
from ramify.lang.backends.base import Backend, Submission
from ramify.lang.backends.http import Event, HttpClient
from ramify.lang.backends.model_info import forget_model_info
from ramify.lang.backends.submitted import SubmittedProgram
from ramify.loop import wait
from ramify.messages import Generate, TextChunk
from ramify.model_info import ModelInfo
from ramify.priority import checked_priority
from ramify.retry import RETRY_FOR_S, Retry
from ramify.spelling import suggests

ABORT_AGAIN_S = 0.01
"""Seconds until an abort is sent again if the server did not know the request. The wait doubles each time."""


class RuntimeEndpoint:
    """The server at `base_url`.

    Args:
        base_url: Such as ``http://127.0.0.1:30000``.
        model: The model of a server of several models. "" stands for the server's first.
        api_key: API key, sent as a bearer token. Default: ``RAMIFY_ENDPOINT_KEY``.
        verify: TLS verification: False, or the path of a CA bundle.
        timeout_s: Longest time without data from the server, in seconds; None for no limit.
        retries, retry_for: How many times, and for how many seconds, a request is sent again after a
            transient failure (`ramify.retry.Retry`).
        priority: Default priority of requests, between -100 and 100: higher goes first.
        lora: Default LoRA adapter of requests.
        cache: Path of the file that answers are kept in (`ramify.answers.AnswerStore`). A request that equals
            an earlier one is answered from the file. The file is made if it does not exist. Only requests of
            programs use it.
    """

    pins = True

    @suggests
    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | bool | None = None,
        chat_template_name: None = None,
        *,
        timeout_s: float | None = None,
        retries: int | None = None,
        retry_for: float = RETRY_FOR_S,
        priority: int | None = None,
        lora: str = "",
        model: str = "",
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        if chat_template_name is not None:
            raise UnsupportedField(
                "chat_template_name is not there.",
                field="chat_template_name",
                remedy="The server's model brings its own template.",
            )
        self.base_url = base_url
        self.retry = Retry(retries, retry_for)
        self.priority = None if priority is None else checked_priority(priority)
        self.lora = lora
        self.answers = None if cache is None else AnswerStore(cache)
        self._options: dict[str, Any] = {
            "api_key": endpoint_key(api_key),
            "verify": True if verify is None else verify,
            "timeout_s": timeout_s,
            "retry": self.retry,
            "not_found": "Leave /v1 out of base_url." if base_url.rstrip("/").endswith("/v1") else None,
        }
        self._name = model
        self._models: dict[str, RuntimeEndpoint] = {model: self}
        """Name → endpoint of the same server, shared by all of them."""
        self._fingerprint = ""
        """Fingerprint of the model, from the last `info`."""
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._requests: set[str] = set()
        """Ids of the requests that have no complete answer yet."""

    @functools.cached_property
    def _http(self) -> HttpClient:
        return HttpClient(self.base_url, **self._options)

    def __repr__(self) -> str:
        on = f" {self._name}" if self._name else ""
        return f"<RuntimeEndpoint {without_credentials(self.base_url)}{on}>"

    def model(self, name: str) -> RuntimeEndpoint:
        """The same server with the model `name`. Only the requests tell whether the server has it."""
        if name not in self._models:
            assert self._http  # which all of them share
            other = self._models[name] = copy.copy(self)
            other._name, other._fingerprint, other.lora = name, "", ""
        return self._models[name]

    def _of_model(self, path: str) -> str:
        return f"{path}?model={quote(self._name, safe='')}" if self._name else path

    # --- the backend ---

    async def info(self) -> ModelInfo:
        answer = await self._http.get(self._of_model("/get_model_info"))
        if "ramify" not in answer:
            raise BackendError(
                f"{self._http.base_url} is not a Ramify server.", remedy="Use OpenAI for other servers."
            )
        info = msgspec.convert(answer["ramify"], ModelInfo)
        self._fingerprint = info.fingerprint
        return msgspec.structs.replace(info, name=self._name) if self._name else info

    async def lora_revisions(self) -> dict[str, str]:
        loras = (await self._http.get(self._of_model("/get_model_info"))).get("loras", {})
        return {name: lora["revision"] for name, lora in loras.items()}

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        own = {"model": self._name, "fingerprint": self._fingerprint}
        body = {"request": request} | {name: value for name, value in own.items() if value}
        events = cast("Any", self._http.events("/v1/calls", body, _CallEvent))
        self._requests.add(request.rid)
        try:
            async with aclosing(events):
                async for event in events:
                    for chunk in event.chunks:
                        yield chunk
        except InvalidRequest as error:
            if error.field == "fingerprint":  # the server was restarted with another model
                forget_model_info(self)
            if request.decide is not None and "unknown field `decide`" in error.message:
                raise UnsupportedNode(
                    "This server has no decisions.", field="decide", remedy="Use a newer server."
                ) from error
            raise
        finally:
            self._requests.discard(request.rid)

    def submit_program(self, submission: Submission, failed: Callable[[], bool]) -> Backend:
        """Send a compiled program to the server as one request."""
        return SubmittedProgram(self, self._name, self._http, submission, failed)

    async def abort(self, rid: str) -> None:
        self._send(self._abort(rid))

    async def _abort(self, rid: str) -> None:
        """Send aborts until the server knows the request. An abort may overtake the request, because both
        have their own connections."""
        pause = ABORT_AGAIN_S
        while not (await self._http.post("/abort_request", {"rid": rid}, once=True)).get("aborted", True):
            if rid not in self._requests:
                return
            await asyncio.sleep(pause)
            pause *= 2

    async def await_tools(self, program: str, branch: str, tools: tuple[str, ...]) -> None:
        body = {"program": program, "branch": branch, "tools": list(tools)}
        self._send(self._http.post("/await_tools", body, once=True))

    async def end_program(self, program: str) -> None:
        self._send(self._http.post("/end_program", {"program": program}, once=True))

    def _send(self, message: Coroutine[Any, Any, object]) -> None:
        """Send a message in the background, so that the program does not wait for the answer."""
        task = asyncio.create_task(_unanswered(message))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)

    async def aclose(self) -> None:
        if self._in_flight:
            await asyncio.wait(self._in_flight)
        await self._http.aclose()

    # --- for users ---

    def get_model_name(self) -> str:
        """The path of the served model."""
        return wait(self.info()).path

    def flush_cache(self) -> bool:
        """Have the server drop every cached prefix that no request uses. Returns True."""
        wait(self._http.post("/flush_cache"))
        return True

    def get_server_info(self) -> dict[str, Any]:
        """The server's configuration and state."""
        return cast("dict[str, Any]", wait(self._http.get(self._of_model("/server_info"))))

    def close(self) -> None:
        """Close all connections."""
        wait(self.aclose())


async def _unanswered(message: Coroutine[Any, Any, object]) -> None:
    with suppress(RamifyError):  # leases expire by themselves, and a lost server has none
        await message


class _CallEvent(Event, frozen=True, kw_only=True):
    chunks: tuple[TextChunk, ...] = ()
