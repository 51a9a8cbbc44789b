"""Every reason why a model, or an option with it, would be refused. Loading reports only the first."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.errors import RamifyError, UnsupportedField
from ramify.runtime.config import EngineConfig
from ramify.runtime.inspect.machine import Machine
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.gguf.config import config_from_gguf
from ramify.runtime.model.gguf.header import read_header, undequantisable
from ramify.runtime.model.shape.config import ModelConfig, ModelShape
from ramify.runtime.model.shape.hf_config import config_from_folder, config_from_hf

OPTIONS: dict[str, tuple[Any, ...]] = {
    "deterministic": (True,),
    "cuda_graphs": (True,),
    "overlap": (True,),
    "speculation": (True,),
    "draft_model": ("MODEL",),
    "quantization": ("int8", "int4"),
    "kv_cache_dtype": ("fp8", "int8"),
}
"""Options that not every model and device supports → the values that ask for them."""


@dataclass(frozen=True)
class Refusal:
    """A refusal. `subject` is an option as on the command line, or a field of the model's configuration."""

    subject: str
    reason: str


def native_shape(
    weights: Path, rope_scaling: Mapping[str, Any] | None = None
) -> tuple[ModelConfig | None, list[Refusal]]:
    """(shape as `load.read_config` reads it, []) if our own code runs the model; else (None, all reasons
    against it).

    To find all reasons, each refused field is removed and the rest is read again.
    """
    if not weights.is_dir():
        header = read_header(weights)
        metadata = dict(header.metadata)
        return _shape(lambda: config_from_gguf(metadata, header.shapes, rope_scaling), metadata)
    try:
        return config_from_folder(weights, rope_scaling), []
    except UnsupportedField:
        config = json.loads((weights / "config.json").read_text(encoding="utf-8"))
        return None, _shape(lambda: config_from_hf(config, None, rope_scaling), config)[1]


def _shape(
    read: Callable[[], ModelConfig], fields: dict[str, Any]
) -> tuple[ModelConfig | None, list[Refusal]]:
    refusals: list[Refusal] = []
    while True:
        try:
            shape = read()
            return (None if refusals else shape), refusals
        except RamifyError as error:
            reason = error.message.removeprefix("This model needs ").rstrip(".")
            if any(refusal.reason == reason for refusal in refusals):
                return None, refusals
            refusals.append(Refusal(error.field or "model", reason))
            # All of quantization_config is removed: without quant_method it would be refused again.
            if not _removed(fields, (error.field or "").removesuffix(".quant_method")):
                return None, refusals


def _removed(fields: Mapping[str, Any], name: str) -> bool:
    """Remove the field `name`; False if there is none. `name` may be a path, as rope_scaling.type, or a field
    of `text_config` in a multimodal config."""
    if isinstance(fields, dict):
        if name in fields:
            del fields[name]
            return True
        first, _, rest = name.partition(".")
        places = [fields.get("text_config"), fields.get(first) if rest else None]
        return any(_removed(place, rest or name) for place in places if isinstance(place, dict))
    return False


def refused_types(weights: Path) -> list[Refusal]:
    """A refusal for each tensor format of a GGUF file that the package `gguf` cannot dequantise."""
    return [
        Refusal("model", f"{name} is stored as GGML {kind}, which cannot be dequantised")
        for name, kind in undequantisable(read_header(weights)).items()
    ]


def refused_options(shape: ModelShape, machine: Machine, config: EngineConfig) -> list[Refusal]:
    """Options with which the engine would not start for this model and machine. Each is tried alone."""
    refusals = []
    for name, values in OPTIONS.items():
        chosen = getattr(config, name)
        for value in (chosen,) if chosen in values else values:
            reason = _refused(shape, machine, EngineConfig(model_impl=config.model_impl, **{name: value}))
            if reason is not None:
                flag = f"--{name.replace('_', '-')}" + (f" {value}" if len(values) > 1 else "")
                refusals.append(Refusal(flag, reason))
    return refusals


def refused_draft(
    shape: ModelShape, config: EngineConfig, device: str, files: ModelFiles, draft: ModelFiles | None
) -> tuple[ModelShape | None, list[Refusal]]:
    """(shape of the draft model that an engine loads on `device`, or of the checkpoint's own head, or None,
    []), or (None, the reason why the draft model cannot draft)."""
    from ramify.runtime.scheduler.speculation.checks import read_draft, speculates

    config = dataclasses.replace(config, speculation=speculates(config, device))
    try:
        found = read_draft(config, shape, files, draft)
    except RamifyError as error:
        return None, [Refusal("--draft-model", error.message.rstrip("."))]
    return found, []


def refused_adapters(shape: ModelShape, loras: Mapping[str, str]) -> list[Refusal]:
    """Adapters that would not load, found by loading them into a model on the meta device."""
    import torch

    from ramify.runtime.model.loading.load import FAMILIES
    from ramify.runtime.model.lora.adapters import Adapters

    if not isinstance(shape, ModelConfig):
        return [Refusal("--lora", "adapters need a model of our own families")] if loras else []
    with torch.device("meta"):
        adapters = Adapters(FAMILIES[shape.family](shape, torch.bfloat16))
    refusals = []
    for name, path in loras.items():
        try:
            adapters.load(name, path)
        except RamifyError as error:
            refusals.append(Refusal(f"--lora {name}", error.message.rstrip(".")))
    return refusals


def _refused(shape: ModelShape, machine: Machine, config: EngineConfig) -> str | None:
    from ramify.runtime.executor.memory import check_states

    experts = isinstance(shape, ModelConfig) and shape.experts is not None
    if machine.device == "cuda" and experts and config.quantization in ("int8", "int4"):
        return "there is no kernel for quantised experts on CUDA"
    if machine.device == "cpu" and config.kv_cache_dtype == "fp8" and config.attention_backend != "torch":
        return "the cpu attention backend reads pages in the model's dtype"
    if machine.device == "cuda" and config.kv_cache_dtype == "int8" and config.attention_backend != "torch":
        return "only the cpu and torch attention backends have int8 pages"
    if machine.device == "cpu" and config.cuda_graphs:
        return "there is no CUDA device"
    quantised = shape.quantised if isinstance(shape, ModelConfig) else None
    if quantised is not None and config.quantization in ("int8", "int4"):
        return f"it is quantised already ({quantised.method})"
    try:
        check_states(config, shape)
        if not isinstance(shape, ModelConfig):
            from ramify.runtime.model.loading.load import check_transformers

            check_transformers(config)
    except UnsupportedField as error:
        return error.message.rstrip(".")
    return None
