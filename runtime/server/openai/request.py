"""The fields that all endpoints of OpenAI's API share, and the generations of a parsed request.

- `cache_salt` (vLLM's) is the cache scope.
- `IGNORED` fields are taken and have no effect.
- `user`, or `safety_identifier`, is written to the log.
- `priority` is SGLang's: higher goes first. Without it `service_tier` stands for one (`TIERS`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ramify.errors import Cancelled, InvalidRequest, NotFound
from ramify.messages import HELD_S, Finish, Generate, TextChunk
from ramify.priority import BATCH
from ramify.runtime.lora_names import unknown
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.metrics import ChoiceUsages
from ramify.runtime.server.params import (
    Explain,
    Tell,
    check_sampling,
    explained,
    split_choices,
    take_priority,
)
from ramify.runtime.server.service import Service
from ramify.sampling_params import SamplingParams

ServiceTier = Literal["auto", "default", "flex", "priority"]
TIERS = {"auto": 0, "default": 0, "flex": BATCH, "priority": 1}
"""The priority that a service tier stands for."""

UNSUPPORTED = {
    "moderation": "",
    "guided_decoding_backend": "It is an option of the server: ramify serve --grammar-backend.",
    "guided_whitespace_pattern": "Use a json_schema format and its whitespace.",
    "any_order": "Write it beside the schema, in response_format.json_schema or text.format.",
    "lora_path": 'Name the adapter in model: its name, or "model:name".',
}
"""Fields that no endpoint supports, with a remedy or ""."""

Ignored = Mapping[str, Sequence[Any] | None]
"""Fields that have no effect on the answer, with the values that they may have, or None for any."""

DEFAULT_VERBOSITY = ("medium",)
"""The only value of ``verbosity`` that is taken: OpenAI's default. Another is asked for in the messages."""

IGNORED: Ignored = {
    "prompt_cache_key": None,  # it chooses a cache, and there is only one
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A request, checked."""

    requests: list[Generate]
    """The requests, one for each choice, by index. Each prompt has n successive ones."""
    explain: Explain
    tell: Tell | None
    n: int
    stream: bool
    include_usage: bool
    user: str | None
    spelled: Mapping[str, str]
    """The client's names of fields that the engine's errors name."""
    headers: Mapping[str, str]
    """Headers of the response."""

    def start_generations(self, service: Service, endpoint: str) -> list[AsyncGenerator[TextChunk, None]]:
        """The chunks of each generation. A generation begins when its iterator is first read."""
        prompts = [ChoiceUsages(self.n) for _ in range(len(self.requests) // self.n)]
        return [
            explained(
                service.generate(request, endpoint, self.user, prompts[index // self.n]),
                self.explain,
                self.spelled,
                self.tell,
            )
            for index, request in enumerate(self.requests)
        ]


def take_header(service: Service, fields: Fields, prefix: str) -> dict[str, Any]:
    """The fields that every response body starts with. Raises `NotFound` for a model that is not served."""
    tier = fields.take("service_tier", ServiceTier)
    model: str | None = fields.take("model", str)
    if model is None:
        raise InvalidRequest("model is missing.", field="model", remedy=f"This is {service.model_name!r}.")
    lora_of(service, model)
    header = {"id": prefix + service.frontend.new_rid(), "created": int(time.time()), "model": model}
    return header if tier is None else {**header, "service_tier": "default" if tier == "auto" else tier}


def lora_of(service: Service, model: str) -> str:
    """The LoRA adapter that `model` names, as "name" or "base:name"; "" for the model alone.

    Raises `NotFound` for a model that is not served.
    """
    # "default" is what SGLang's examples call the one model that a server has.
    own = (service.model_name, "default")
    if model in own:
        return ""
    loras = service.frontend.loras.loaded
    if model in loras:
        return model
    base, _, name = model.rpartition(":")
    if base in own:
        if name not in loras:
            raise unknown(name, loras, "model")
        return name
    names = ", ".join([repr(service.model_name), "'default'", *map(repr, sorted(loras))])
    raise NotFound(f"There is no model {model!r} here.", field="model", remedy=f"Use one of {names}.")


def parse_request(
    service: Service,
    fields: Fields,
    header: Mapping[str, Any],
    prompts: Sequence[Generate],
    sampling: SamplingParams,
    *,
    explain: Explain,
    tell: Tell | None = None,
    spelled: Mapping[str, str],
    unsupported: Mapping[str, str],
    ignored: Ignored,
) -> ParsedRequest:
    """The parsed request. `header` is that of `take_header`; `prompts` has one generation for each prompt,
    without sampling options.

    Takes the rest of `fields`, and refuses those that are left then.
    """
    scope: str = fields.take("cache_salt", str, "")
    fields.ignore(ignored)
    stream: bool = fields.take("stream", bool, False)
    include_usage = False
    stream_options = fields.take_object("stream_options")
    if stream_options is not None:
        include_usage = stream_options.take("include_usage", bool, False)
        if include_usage and not stream:
            raise InvalidRequest("stream_options needs stream: true.", field="stream_options")
        stream_options.refuse_rest({"include_obfuscation": "", "continuous_usage_stats": ""})
    user = _take_user(fields)
    priority = take_priority(fields, TIERS[fields.take("service_tier", ServiceTier, "auto")])
    fields.refuse_rest(unsupported)
    choices = [(prompt, options) for prompt in prompts for options in split_choices(sampling)]
    return ParsedRequest(
        requests=[
            msgspec.structs.replace(
                prompt,
                rid=f"{prompt.rid}-{index}" if len(choices) > 1 else prompt.rid,
                sampling=options,
                scope=scope,
                lora=lora_of(service, header["model"]),
                every_s=0.0 if stream else HELD_S,
                priority=priority,
                flow=prompt.rid,
            )
            for index, (prompt, options) in enumerate(choices)
        ],
        explain=explain,
        tell=tell,
        n=sampling.n,
        stream=stream,
        include_usage=include_usage,
        user=user,
        spelled=spelled,
        headers=service.tell_ignored(fields.ignored),
    )


def with_top_logprobs(sampling: SamplingParams, top: int | None) -> SamplingParams:
    """`sampling` with log-probabilities: of the sampled token, and of the `top` likeliest ones."""
    return check_sampling(msgspec.structs.replace(sampling, logprobs=top or 0), {"logprobs": "top_logprobs"})


def refuse_abort(finish: Finish | None) -> None:
    # OpenAI's API has no finish reason for a request that was aborted by another one.
    if finish is not None and finish.reason == "abort":
        raise Cancelled("The request was aborted.")


def _take_user(fields: Fields) -> str | None:
    user: str | None = fields.take("user", str)
    identifier: str | None = fields.take("safety_identifier", str)
    if user is not None and identifier is not None and user != identifier:
        raise InvalidRequest("user and safety_identifier mean the same; give one.", field="safety_identifier")
    return user if identifier is None else identifier
