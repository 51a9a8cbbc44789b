"""Bodies of SGLang's native API: /generate, /model_info and /server_info."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from ramify import __version__
from ramify.messages import ChoiceScore, Finish, Generate, TokenLogprobs
from ramify.runtime.generation import GenerationResult
from ramify.runtime.server.service import Service


def generation_body(
    request: Generate, result: GenerationResult, texts: bool, part: GenerationResult | None = None
) -> dict[str, Any]:
    """The body of one generation. With `texts`, log-probabilities include the texts of the tokens.

    `part` is the output since the previous body, for bodies that only have new output. Lengths and counts are
    still those of the whole `result`.
    """
    usage, part = result.usage, result if part is None else part
    # The final usage comes with the last chunk. Until then the tokens are counted by their ids.
    output_tokens = len(result.ids) if result.finish is None else usage.completion_tokens
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": result.finish and _finish_reason(result.finish, usage.completion_tokens),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": output_tokens,
        "cached_tokens": usage.cached_tokens,
        "distinct_tokens": usage.distinct_tokens,
        "evicted_tokens": usage.evicted_tokens,
        "evicted_by": usage.evicted_by,
        "num_retractions": usage.retractions,
        "forced_tokens": usage.forced_tokens,
        "kept_ids": result.kept_ids,
        "tail": result.tail,
        "grammar_s": usage.grammar_s,
        "queue_s": usage.queue_s,
        "first_token_s": usage.first_token_s,
        "total_s": usage.total_s,
    }
    if result.forced:
        meta["forced_places"] = result.forced
    if result.enforcement is not None:
        meta |= result.enforcement.fields()
    if result.violations is not None:
        meta["violations"] = result.violations
    if request.choices is not None:
        meta["choices"] = [_choice(score) for score in result.choices]
    if request.sampling.logprobs is not None:
        meta["input_token_logprobs"] = _token_logprobs(result.prompt_logprobs, texts)
        meta["output_token_logprobs"] = _token_logprobs(part.logprobs, texts)
        meta["output_token_logprobs_length"] = sum(len(run.ids) for run in result.logprobs)
        if request.sampling.logprobs:
            meta["input_top_logprobs"] = _top_logprobs(result.prompt_logprobs, texts)
            meta["output_top_logprobs"] = _top_logprobs(part.logprobs, texts)
    return {"text": part.text, "output_ids": part.ids, "meta_info": meta}


def _finish_reason(finish: Finish, length: int) -> dict[str, Any]:
    match finish.reason:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": length}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _choice(score: ChoiceScore) -> dict[str, Any]:
    found: dict[str, Any] = {"token_logprobs": _token_logprobs([score.tokens], True), "behind": score.behind}
    if score.unconditional is not None:
        found["unconditional_token_logprobs"] = _token_logprobs([score.unconditional], True)
    return found


def _token_logprobs(runs: list[TokenLogprobs], texts: bool) -> list[tuple[float | None, int, str | None]]:
    """SGLang's triples (log-probability, token id, text)."""
    return [
        (run.logprobs[i], run.ids[i], run.texts[i] if texts else None)
        for run in runs
        for i in range(len(run.ids))
    ]


def _top_logprobs(runs: list[TokenLogprobs], texts: bool) -> list[list[tuple[float, int, str | None]] | None]:
    return [
        [
            (logprob, token, run.top_texts[i][k] if texts else None)
            for k, (token, logprob) in enumerate(run.top[i])
        ]
        or None
        for run in runs
        for i in range(len(run.top))
    ]


def model_info(service: Service) -> dict[str, Any]:
    """The body of SGLang's /model_info, with the `ModelInfo` under the key ``ramify``."""
    info = service.frontend.info
    return {
        "model_path": info.path,
        "served_model_name": service.model_name,
        "tokenizer_path": info.path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "loras": msgspec.to_builtins(dict(service.frontend.loras.loaded)),
        "ramify": msgspec.to_builtins(info),
    }


async def server_info(service: Service) -> dict[str, Any]:
    """The body of SGLang's /server_info: configuration, without the API key, and scheduler counters."""
    config = dataclasses.asdict(service.config)
    config["api_key"] = None if config["api_key"] is None else "set"
    return {
        **config,
        "max_running": service.max_running,
        "chunk_tokens": service.config.chunk_tokens or service.frontend.info.chunk_tokens,
        "page_size": service.frontend.info.page_size,
        "model_path": service.frontend.info.path,
        "version": __version__,
        "max_prompt_tokens": service.frontend.max_prompt_tokens,
        "kv_room": msgspec.to_builtins(service.frontend.info.kv_room),
        "in_flight": service.frontend.in_flight,
        "internal_states": [msgspec.to_builtins(await service.frontend.control.stats())],
    }
