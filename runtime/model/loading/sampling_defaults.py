"""Sampling options that a model's own files recommend."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import InvalidRequest
from ramify.runtime.model.gguf.header import read_header
from ramify.sampling_params import SamplingParams

log = logging.getLogger("ramify")

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF = dict(zip(("temp", "top_p", "top_k", "min_p", "penalty_repeat"), _NAMES, strict=True))
"""The last part of a GGUF file's ``general.sampling.…`` → our name."""


def sampling_defaults_of(weights: Path) -> dict[str, Any]:
    """The options in `generation_config.json` of the folder `weights`, or in the metadata of the GGUF file.

    As on vLLM and SGLang, ``do_sample`` is not read. An option that is out of range is left out, with a line
    in the log.
    """
    if weights.is_dir():
        given = _read_json(weights / "generation_config.json")
    else:
        metadata = read_header(weights).metadata
        given = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in _GGUF.items()}
    found = {}
    for name in _NAMES:
        if (value := given.get(name)) is None:
            continue
        if name == "top_k" and value == -1:
            value = 0
        try:
            msgspec.convert({name: value}, SamplingParams).check()
        except (InvalidRequest, msgspec.ValidationError):
            log.warning("The model recommends %s = %r, which is out of range: it is left out.", name, value)
        else:
            found[name] = value
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
