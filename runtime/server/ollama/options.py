"""Parses the object ``options`` of Ollama's API, and the fields that all its requests share.

An option that cannot change the answer is ignored by name; another one is taken, or refused by name.
"""

from __future__ import annotations

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.openai.request import check_context, lora_of
from ramify.runtime.server.params import take_sampling
from ramify.runtime.server.service import Service
from ramify.runtime.server.tables.ollama import EMBED_OPTIONS, OPTIONS
from ramify.sampling_params import SamplingParams

SPELLING = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}
"""Option of Ollama's → ours."""

WHOLE_CONTEXT = -1
"""The value of ``repeat_last_n`` that lets penalties look at all tokens."""


def take_model(service: Service, fields: Fields, *, old: bool = False) -> tuple[str, str]:
    """(``model`` as the client wrote it, the LoRA adapter that it names or "").

    Without one it is the served model. With `old`, of requests about a model, it is required, and may stand
    in ``name``, where older releases had it. Raises `InvalidRequest` if it is missing there, and `NotFound`
    for a model that is not served.
    """
    name: str = fields.take("name", str, "") if old else ""
    model: str = fields.take("model", str) or name or ("" if old else service.model_name)
    if not model:
        raise InvalidRequest("model is missing.", field="model", remedy=f"This is {service.model_name!r}.")
    return model, lora_of(service, model)


def take_options(service: Service, fields: Fields) -> SamplingParams:
    """Take the sampling options from the object ``options``."""
    options = fields.take_object("options") or Fields({}, "options", fields.body)
    check_context(service, options)
    sampling = take_sampling(
        options,
        SPELLING,
        unset={"num_predict": (-1, -2), "seed": (-1,)},
        least_tokens=1,
        unlimited="Write -1 for as many as fit into the context.",
        **service.sampling_defaults,
    )
    last: int | None = options.take("repeat_last_n", int)
    if last not in (None, WHOLE_CONTEXT) and sampling.penalises:
        path = options.path("repeat_last_n")
        raise UnsupportedField(
            f"{path} is {last}; penalties look at all tokens here.",
            field=path,
            remedy=f"Leave it out, or write {WHOLE_CONTEXT}.",
        )
    if not sampling.penalises:
        options.ignore({"repeat_last_n": None})
    options.finish(OPTIONS)
    return sampling


def ignore_options(service: Service, fields: Fields) -> None:
    """Take the object ``options`` of an embedding, on which no option has an effect."""
    options = fields.take_object("options")
    if options is not None:
        check_context(service, options)
        options.finish(EMBED_OPTIONS)
