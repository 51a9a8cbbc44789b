"""A backend for any endpoint with OpenAI's chat or completions API.

Such an endpoint takes whole messages and reports no token ids. An option or constraint that the API lacks is
refused with `UnsupportedNode`; nothing is dropped silently.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

from ramify.answers import AnswerStore
from ramify.constraint import Constraint, closed_object
from ramify.credentials import without_credentials
from ramify.decisions.checks import check_decide
from ramify.errors import InvalidRequest, NotFound, UnsupportedNode
from ramify.lang.backends.decisions.apis import DECISION_APIS, DecisionApi, is_missing
from ramify.lang.backends.decisions.logprobs import scores_by_logprobs
from ramify.lang.backends.http import HttpClient
from ramify.lang.backends.openai_stream import text_chunks, unwrapped
from ramify.lang.prompt.chat import chatml
from ramify.lang.prompt.thinking import DEFAULT_TOKENS
from ramify.loop import wait
from ramify.messages import Finish, Generate, TextChunk, Thinking, Usage
from ramify.model_info import ModelInfo
from ramify.priority import checked_priority
from ramify.questions import Decide, DecisionScores
from ramify.retry import RETRY_FOR_S, Retry
from ramify.sampling_params import SamplingParams
from ramify.spelling import check_word, suggests

OPENAI_URL = "https://api.openai.com/v1"
ThinkingFields = Literal["effort", "reasoning", "template"]
RETRIES_BEGUN = 2
"""Number of further attempts of a request whose answer broke off. OpenAI's own client also makes two further
attempts."""
OWN_FIELDS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop")
EXTENSIONS = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
)
"""Sampling options that OpenAI's API lacks, and that Ramify, SGLang and vLLM servers take."""


class OpenAI:
    """The model `model_name` of an OpenAI-compatible endpoint.

    Questions (`decide`) go to the endpoint's ``/decisions``, else to its ``/systemone``. If it has neither,
    each question is a request for the log-probabilities of the options' labels, and is refused if an option
    is not among the 20 most probable tokens. Which of the three it is, the first request finds out.

    Args:
        base_url: URL that ends in ``/v1``. Default: ``OPENAI_BASE_URL``, else OpenAI's own.
        api_key: Default: ``OPENAI_API_KEY``.
        is_chat_model: Whether to use the chat API. False uses the completions API, with the program's text as
            the prompt.
        extensions: Whether the endpoint takes the fields in `EXTENSIONS`, and `regex`, `ebnf` and
            `guided_choice` as a Ramify server does. None: true for a Ramify server; a request finds out
            whether the endpoint is one.
        json_choices: If the endpoint cannot be constrained to a list of choices, ask for a JSON object whose
            only property is an enumeration of the choices. A `select` then takes the choice that the model
            writes in this JSON object, not the choice with the best score.
        thinking: The request fields that switch thinking on and off (``gen(thinking=…)``). ``effort``:
            ``reasoning_effort``, OpenAI's own. ``reasoning``: ``{"enabled": …, "max_tokens": …}``, of
            OpenRouter and of Ramify's server. ``template``: ``chat_template_kwargs``, of SGLang and vLLM.
            None: ``reasoning`` for a Ramify server, else ``effort``. Thoughts are read from
            ``reasoning_content`` or ``reasoning`` in the deltas; OpenAI sends no thoughts. Endpoints count
            thoughts towards max_tokens, so the thoughts' own max_tokens (1024 if none is set) is added to it.
        timeout_s: Longest time without data from the endpoint, in seconds; None for no limit.
        retries, retry_for: How many times, and for how many seconds, a request is sent again after a
            transient failure (`ramify.retry.Retry`). A request that the endpoint may have begun to answer,
            and so may bill, is sent again at most twice. After a failure that is not transient no request is
            sent again.
        priority: Priority of requests for which the program sets none; as in SGLang, higher goes first. A
            priority is refused for endpoints without `extensions`. None: the requests of a batch are sent
            without a priority.
        cache: Path of the file that answers are kept in (`ramify.answers.AnswerStore`). A request that equals
            an earlier one is answered from the file. The file is made if it does not exist. Only requests of
            programs use it.
    """

    @suggests
    def __init__(
        self,
        model_name: str,
        is_chat_model: bool = True,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        extensions: bool | None = None,
        json_choices: bool = False,
        thinking: ThinkingFields | None = None,
        timeout_s: float | None = None,
        retries: int | None = None,
        retry_for: float = RETRY_FOR_S,
        priority: int | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        self.model_name = model_name
        self._models: dict[str, OpenAI] = {model_name: self}
        """Name → model of the same endpoint, shared by all of them."""
        self.takes_messages = is_chat_model
        self._base_url = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        self._api_key = api_key or os.environ.get("OPENAI_API_KEY")
        self._extensions = extensions
        self._json_choices = json_choices
        if thinking is not None:
            check_word("thinking", thinking, get_args(ThinkingFields))
        self._thinking = thinking
        self._timeout_s = timeout_s
        self.retry = Retry(retries, retry_for, RETRIES_BEGUN)
        if priority is not None:
            self.priority = checked_priority(priority)
        self.answers = None if cache is None else AnswerStore(cache)
        self._decision_apis: tuple[DecisionApi, ...] = DECISION_APIS
        """The APIs that the endpoint may have; once that is known, the one that it has, or none."""

    def model(self, name: str) -> OpenAI:
        """The model `name` of the same endpoint, with the same options."""
        if name not in self._models:
            assert self._http  # which all of them share
            other = self._models[name] = copy.copy(self)
            other.model_name = name
        return self._models[name]

    def __repr__(self) -> str:
        return f"<OpenAI {self.model_name} at {without_credentials(self._base_url)}>"

    @functools.cached_property
    def _http(self) -> HttpClient:
        return HttpClient(
            self._base_url,
            self._api_key,
            timeout_s=self._timeout_s,
            retry=self.retry,
            not_found=None if urlsplit(self._base_url).path.strip("/") else "Add /v1 to base_url.",
        )

    async def info(self) -> ModelInfo:
        """Describe the model, without a request to the endpoint. The returned chat format serves only
        `ProgramState.text`; chats are sent as messages."""
        return ModelInfo(
            name=self.model_name,
            path=without_credentials(self._base_url),
            vocab_size=0,
            context_length=0,
            eos_token_ids=(),
            bos_token_id=None,
            dtype="",
            device="",
            chat_format=chatml() if self.takes_messages else None,
            fingerprint=f"{without_credentials(self._base_url)} {self.model_name} {self._json_choices}",
        )

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        if request.decide is not None:
            yield await self._decide(request, request.decide)
            return
        body = {
            "model": self.model_name,
            "stream": True,
            "stream_options": {"include_usage": True},
            **await self._prompt(request),
            **await self._options(request.sampling),
            **await self._think(request.thinking),
        }
        if request.thinking is not None and request.thinking.enabled:
            thoughts = request.thinking.max_tokens
            for limit in ("max_tokens", "max_completion_tokens"):
                if limit in body:
                    body[limit] += DEFAULT_TOKENS if thoughts is None else thoughts
        wrapped = await self._constrain(body, request)
        body |= await self._placed(request)
        path = "/chat/completions" if self.takes_messages else "/completions"
        chunks = text_chunks(self._http, path, body, request.rid)
        async with aclosing(cast("Any", chunks)):
            if wrapped:
                yield await unwrapped(chunks)
                return
            async for chunk in chunks:
                yield chunk

    async def end_program(self, program: str) -> None:
        """Do nothing: the endpoint keeps no state of programs."""

    async def aclose(self) -> None:
        await self._http.aclose()

    def close(self) -> None:
        """Close all connections."""
        wait(self.aclose())

    async def _placed(self, request: Generate) -> dict[str, Any]:
        """The fields of the cache scope and of the priority."""
        fields: dict[str, Any] = {}
        if request.scope:
            await self._need_extensions("cache scopes", "cache_scope", None)
            fields["cache_salt"] = request.scope
        if request.lora:
            raise UnsupportedNode(
                "This endpoint's adapters are models of their own.",
                field="lora",
                remedy=f"Say OpenAI({request.lora!r}, …), and name that backend in the step.",
            )
        if request.priority:
            await self._need_extensions(
                "priorities", "priority", "If it has SGLang's, say OpenAI(extensions=True)."
            )
            fields["priority"] = request.priority
        return fields

    async def _decide(self, request: Generate, decide: Decide) -> TextChunk:
        """The answer of the first decision API that the endpoint has, else of log-probabilities. The way that
        was found is taken from then on.

        A layout, an end and an order of options are honoured by Ramify's server and with log-probabilities
        alone: other decision APIs write the questions themselves.
        """
        check_decide(request)
        for field in ("opening", "closing", "prompt_ids"):
            if getattr(decide, field):
                raise UnsupportedNode(
                    f"This endpoint takes no {field}.",
                    field=f"decide.{field}",
                    remedy="Use Engine or RuntimeEndpoint.",
                )
        prompt = await self._prompt(request)
        written = _written(decide)
        body = {"model": self.model_name, **await self._placed(request), **written}
        apis = () if written and not await self._has_extensions() else self._decision_apis
        for api in apis:
            asked = api.body(request.chat or prompt["prompt"], decide.questions)
            try:
                answer = await self._http.post(api.path, body | asked, once=True)
            except (InvalidRequest, NotFound) as error:
                if len(apis) == 1 or not is_missing(error):
                    raise
                continue
            self._decision_apis = (api,)
            return _decided(request, *api.scores(decide.questions, answer))
        off = Thinking(enabled=False) if self._thinking in ("template", "reasoning") else None
        answered = await scores_by_logprobs(self.generate, self.retry, request, decide, off)
        if apis:
            self._decision_apis = ()
        return _decided(request, *answered)

    async def _prompt(self, request: Generate) -> dict[str, Any]:
        if request.preambles:
            raise UnsupportedNode("The completions API takes no thinking.", field="thinking")
        if request.chat is not None:
            messages = [{"role": turn.role, "content": turn.content} for turn in request.chat]
            for message, turn in zip(messages, request.chat, strict=True):
                if turn.reasoning and await self._thinks_by() != "effort":
                    message["reasoning_content"] = turn.reasoning
            return {"messages": messages}
        if self.takes_messages or not all(isinstance(segment, str) for segment in request.prompt):
            raise UnsupportedNode("This endpoint takes no token ids, and a chat model no plain text.")
        return {"prompt": "".join(cast("tuple[str, ...]", request.prompt))}

    async def _thinks_by(self) -> str:
        if self._thinking is None:
            self._thinking = "reasoning" if await self._is_ramify() else "effort"
        return self._thinking

    async def _think(self, wanted: Thinking | None) -> dict[str, Any]:
        if wanted is None:
            return {}
        fields = await self._thinks_by()
        if fields == "reasoning":
            limit = wanted.max_tokens
            if limit is None and wanted.effort is None and wanted.enabled:
                limit = DEFAULT_TOKENS
            given = {"effort": wanted.effort, "max_tokens": limit}
            return {
                "reasoning": {"enabled": wanted.enabled}
                | {name: value for name, value in given.items() if value is not None}
            }
        if wanted.max_tokens is not None:
            raise UnsupportedNode(
                "This endpoint has no budget of thoughts.",
                field="thinking.max_tokens",
                remedy='If it has, say OpenAI(thinking="reasoning").',
            )
        if fields == "effort":
            return {"reasoning_effort": (wanted.effort or "medium") if wanted.enabled else "none"}
        if wanted.effort is not None:
            raise UnsupportedNode("This endpoint has no effort.", field="thinking.effort")
        return {"chat_template_kwargs": dict.fromkeys(("enable_thinking", "thinking"), wanted.enabled)}

    async def _options(self, sampling: SamplingParams) -> dict[str, Any]:
        if sampling.max_tokens == 0 or sampling.prompt_logprobs_start is not None:
            raise UnsupportedNode(
                "This endpoint cannot score a prompt.", remedy="Use Engine or RuntimeEndpoint for select."
            )
        options: dict[str, Any] = {}
        if sampling.max_tokens is not None:
            newer = self._base_url == OPENAI_URL and self.takes_messages
            options["max_completion_tokens" if newer else "max_tokens"] = sampling.max_tokens
        default = SamplingParams()
        for name in (*OWN_FIELDS, *EXTENSIONS):
            value = getattr(sampling, name)
            if value == getattr(default, name):
                continue
            if name in EXTENSIONS:
                await self._need_extensions(name, name, "If it has, say OpenAI(extensions=True).")
            options[name] = value
        if sampling.logprobs is not None:
            options["logprobs"] = self.takes_messages or sampling.logprobs
            if sampling.logprobs and self.takes_messages:
                options["top_logprobs"] = sampling.logprobs
        return options

    async def _constrain(self, body: dict[str, Any], request: Generate) -> bool:
        """Add the constraint to `body`; returns whether the answer is wrapped in a JSON object."""
        constraint = request.constraint
        if constraint is None:
            return False
        if self.takes_messages and constraint.kind == "json_schema":
            body["response_format"] = form = _response_format(json.loads(constraint.source))
            form["json_schema"] |= await self._json_options(constraint)
            return False
        if self.takes_messages and constraint.kind == "json_object":
            body["response_format"] = {"type": "json_object", **await self._json_options(constraint)}
            return False
        if constraint.kind in ("regex", "ebnf", "choices") and await self._has_extensions():
            if constraint.kind == "choices":
                body["guided_choice"] = json.loads(constraint.source)
            else:
                body[constraint.kind] = constraint.source
            return False
        if self.takes_messages and constraint.kind == "choices" and self._json_choices:
            body["response_format"] = _response_format(
                closed_object({"choice": {"enum": json.loads(constraint.source)}})
            )
            return True
        hint = " Or say OpenAI(json_choices=True)." if constraint.kind == "choices" else ""
        raise UnsupportedNode(
            f"This endpoint cannot hold the output to a constraint of kind {constraint.kind}.",
            field=constraint.kind,
            remedy=f"Use Engine or RuntimeEndpoint.{hint}",
        )

    async def _json_options(self, constraint: Constraint) -> dict[str, Any]:
        """The request fields for the options of JSON constraints that differ from their defaults. Raises
        `UnsupportedNode` for an option that the endpoint lacks."""
        options = {
            field: getattr(constraint, field)
            for field, default in (("whitespace", "natural"), ("any_order", False), ("strict", True))
            if getattr(constraint, field) != default
        }
        for field, value in options.items():
            if (field, value) != ("strict", False):
                await self._need_extensions(field, field, "Leave it out, or use Engine or RuntimeEndpoint.")
        return options

    async def _has_extensions(self) -> bool:
        if self._extensions is None:
            self._extensions = await self._is_ramify()
        return self._extensions

    async def _need_extensions(self, what: str, field: str, remedy: str | None) -> None:
        """Raise `UnsupportedNode` if the endpoint lacks the extensions, and so lacks `what`."""
        if not await self._has_extensions():
            raise UnsupportedNode(f"This endpoint has no {what}.", field=field, remedy=remedy)

    async def _is_ramify(self) -> bool:
        try:
            cards = (await self._http.get("/models"))["data"]
            return any(card["owned_by"] == "ramify" for card in cards)
        except (LookupError, TypeError):
            return False
        except NotFound as error:
            if error.remedy is not None:  # the remedy is for a base_url without /v1
                raise
            return False


def _written(decide: Decide) -> dict[str, Any]:
    """The fields of `decide` about the way in which questions are written, where they are not the default."""
    fields = (("layout", "auto"), ("end", "prefix"), ("permutations", 1))
    return {name: getattr(decide, name) for name, default in fields if getattr(decide, name) != default}


def _decided(request: Generate, scores: DecisionScores, usage: Usage) -> TextChunk:
    return TextChunk(rid=request.rid, decisions=scores, usage=usage, finish=Finish(reason="length"))


def _response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
