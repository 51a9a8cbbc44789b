"""The bodies of /model_info and /server_info."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from ramify import __version__
from ramify.runtime.server.service import Service


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
    """The body of SGLang's /server_info: the configuration without the API key, and the scheduler's
    counters."""
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
        "in_flight": service.frontend.status.in_flight,
        "internal_states": [msgspec.to_builtins(await service.frontend.control.stats())],
    }
