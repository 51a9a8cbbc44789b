"""A Ramify server over its native HTTP surface, which has the shape of SGLang's.

Prompts go as segments, so that generated text is sent back as the token ids it came as.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

import msgspec

from ramify.errors import BackendError, RamifyError
from ramify.lang.backends.base import Backend, Submission
from ramify.lang.backends.http import HttpClient
from ramify.lang.backends.submitted import SubmittedProgram
from ramify.lang.meta import read_finish, read_logprobs, read_usage
from ramify.lang.refused import refuse
from ramify.loop import wait
from ramify.messages import Generate, ModelInfo, TextChunk, TokenLogprobs

SPELLINGS = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
"""Our names for sampling options → SGLang's; the others are the same."""

NOT_SAMPLING = ("n", "logprobs", "prompt_logprobs_start")


class RuntimeEndpoint:
    """The server at `base_url`.

    Args:
        base_url: Such as ``http://127.0.0.1:30000``.
        api_key: Sent as a bearer token.
        verify: TLS verification: False, or the path of a CA bundle.
        timeout_s: Longest silence of the server, in seconds; None waits for ever.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | bool | None = None,
        chat_template_name: None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        if chat_template_name is not None:
            refuse("chat_template_name", "The server's model brings its own template.")
        self.base_url = base_url
        self._options: dict[str, Any] = {
            "api_key": api_key,
            "verify": True if verify is None else verify,
            "timeout_s": timeout_s,
        }
        self._told: set[asyncio.Task[Any]] = set()

    @functools.cached_property
    def _http(self) -> HttpClient:
        return HttpClient(self.base_url, **self._options)

    # --- the backend ---

    async def info(self) -> ModelInfo:
        answer = await self._http.get("/get_model_info")
        if "ramify" not in answer:
            raise BackendError(
                f"{self.base_url} is not a Ramify server.", remedy="Use OpenAI for other servers."
            )
        return msgspec.convert(answer["ramify"], ModelInfo)

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        body = request_body(request)
        if request.sampling.max_tokens == 0:
            yield _chunk(request, await self._http.post("/generate", body), 0, 0, 0)
            return
        text = ids = logprobs = 0
        events = cast("Any", self._http.events("/generate", {**body, "stream": True}))
        async with aclosing(events):
            async for event in events:
                yield _chunk(request, event, text, ids, logprobs)
                text, ids = len(event["text"]), len(event["output_ids"])
                logprobs = len(event["meta_info"].get("output_token_logprobs", ()))

    def submit_program(self, submission: Submission, failed: Callable[[], bool]) -> Backend:
        """A compiled program goes to the server whole, as one request."""
        return SubmittedProgram(self._http, submission, failed)

    async def await_tools(self, program: str, branch: str, tools: tuple[str, ...]) -> None:
        self._tell("/await_tools", {"program": program, "branch": branch, "tools": list(tools)})

    async def end_program(self, program: str) -> None:
        self._tell("/end_program", {"program": program})

    def _tell(self, path: str, body: dict[str, Any]) -> None:
        """Without making the program wait for the answer."""
        task = asyncio.create_task(self._post(path, body))
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        try:
            await self._http.post(path, body)
        except RamifyError:
            return  # the server is gone, or will let the leases run out

    async def aclose(self) -> None:
        if self._told:
            await asyncio.wait(self._told)
        await self._http.aclose()

    # --- for users ---

    def get_model_name(self) -> str:
        """The path of the served model."""
        return wait(self.info()).path

    def flush_cache(self) -> bool:
        """Have the server drop every cached prefix that nothing uses."""
        return bool(wait(self._call("POST", "/flush_cache")).get("flushed", True))

    def get_server_info(self) -> dict[str, Any]:
        """The server's configuration and state."""
        return cast("dict[str, Any]", wait(self._call("GET", "/server_info")))

    def close(self) -> None:
        """Close all connections."""
        wait(self.aclose())

    async def _call(self, method: str, path: str) -> Any:
        return await (self._http.get(path) if method == "GET" else self._http.post(path))


def request_body(request: Generate) -> dict[str, Any]:
    """The JSON of ``POST /generate``."""
    sampling = request.sampling
    options = {
        SPELLINGS.get(name, name): value
        for name, value in msgspec.to_builtins(sampling).items()
        if name not in NOT_SAMPLING
    }
    body: dict[str, Any] = {
        "rid": request.rid,
        "prompt_segments": msgspec.to_builtins(request.prompt),
        "sampling_params": {"max_new_tokens": sampling.max_tokens, **options},
    }
    if sampling.logprobs is not None or sampling.prompt_logprobs_start is not None:
        start = sampling.prompt_logprobs_start
        body["return_logprob"] = body["return_text_in_logprobs"] = True
        body["top_logprobs_num"] = sampling.logprobs or 0
        body["logprob_start_len"] = -1 if start is None else start
    if request.constraint is not None:
        body["constraint"] = {"kind": request.constraint.kind, "source": request.constraint.source}
    if request.hint is not None:
        body["program"] = msgspec.to_builtins(request.hint)
    if request.scope:
        body["cache_scope"] = request.scope
    return body


def _chunk(request: Generate, answer: dict[str, Any], text: int, ids: int, logprobs: int) -> TextChunk:
    """What an answer, which holds all output so far, adds to the counts of before."""
    meta = answer["meta_info"]
    sampling = request.sampling
    first = ids == 0
    return TextChunk(
        rid=request.rid,
        text=answer["text"][text:],
        ids=tuple(answer["output_ids"][ids:]),
        forced=tuple(place - ids for place in meta.get("forced_places", ()) if place >= ids),
        logprobs=_since(read_logprobs(meta, "output"), logprobs) if sampling.logprobs is not None else None,
        prompt_logprobs=(
            read_logprobs(meta, "input") if first and sampling.prompt_logprobs_start is not None else None
        ),
        usage=read_usage(meta),
        finish=read_finish(meta),
        kept_ids=meta.get("kept_ids", 0),
        tail=meta.get("tail", ""),
    )


def _since(found: TokenLogprobs | None, start: int) -> TokenLogprobs | None:
    """The tokens from position `start` on."""
    if found is None:
        return None
    return TokenLogprobs(**{name: getattr(found, name)[start:] for name in TokenLogprobs.__struct_fields__})
