"""From files to a model that is ready to run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.model.checkpoint import weight_files
from ramify.runtime.model.config import Family, ModelConfig, config_from_folder
from ramify.runtime.model.decoder import Attend, Model
from ramify.runtime.model.families.gemma import Gemma2, Gemma3
from ramify.runtime.model.families.granite import Granite
from ramify.runtime.model.families.llama import Llama
from ramify.runtime.model.families.mistral import Mistral
from ramify.runtime.model.families.olmo2 import Olmo2
from ramify.runtime.model.families.phi3 import Phi3
from ramify.runtime.model.families.qwen2 import Qwen2
from ramify.runtime.model.families.qwen3 import Qwen3
from ramify.runtime.model.families.smollm3 import SmolLM3
from ramify.runtime.model.gguf.header import read_header
from ramify.runtime.model.gguf.weights import config_of, rotary_layout, tensors_in_file
from ramify.runtime.model.hub.resolve import ModelFiles
from ramify.runtime.model.layers import RMSNorm
from ramify.runtime.model.packed_cache import load_packed
from ramify.runtime.model.quantization import Quantization, packing
from ramify.runtime.model.weights import fill, tensors_in_folder

__all__ = ["Attend", "Model", "dummy_model", "load_model", "read_config", "shortened"]

FAMILIES: dict[Family, type[Model]] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gemma2": Gemma2,
    "gemma3": Gemma3,
    "phi3": Phi3,
    "smollm3": SmolLM3,
    "olmo2": Olmo2,
    "granite": Granite,
}


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    context_length: int | None = None,
    quantization: Quantization = "none",
    packed: bool = False,
    deterministic: bool = False,
) -> Model:
    """The model in `files`, its weights converted to `dtype` on `device`.

    `context_length` shortens the model's own, and with it the table of rotations. With `packed`, or with any
    quantization, matrices are laid out for the compiled kernels where there is a form for their numbers,
    once for all starts: the result lies in the cache folder. With `packed` and `deterministic` all of them
    are: torch's products depend on the number of rows.
    Raises `InvalidRequest` or `UnsupportedField` where the checkpoint is not one that can be run.
    """
    config = shortened(read_config(files.weights), context_length)
    form = packing(quantization, dtype, everything=packed and deterministic)
    if quantization == "none" and not (packed and form):
        return _filled(files.weights, config, dtype, device, quantised=False)
    if str(device) != "cpu":
        raise UnsupportedField(
            f"quantization is {quantization!r}, which there is for the CPU only.", field="quantization"
        )

    def full() -> Model:
        model = _filled(files.weights, config, dtype, device, quantised=quantization == "gguf")
        model.pack(form)
        return model

    paths = weight_files(files.weights) if files.weights.is_dir() else [files.weights]
    variant = f"{quantization}-{str(dtype).removeprefix('torch.')}"
    if deterministic and dtype == torch.float32:
        variant += "-whole"
    return load_packed(paths, variant, lambda: _empty(config, dtype, device), full)


def _filled(
    weights: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, *, quantised: bool
) -> Model:
    model = _empty(config, dtype, device)
    if weights.is_dir():
        fill(model, tensors_in_folder(weights), layout="halves")
    else:
        tensors = tensors_in_file(read_header(weights), dtype, quantised=quantised)
        fill(model, tensors, layout=rotary_layout(config))
    return model


@torch.inference_mode()
def dummy_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    packed: bool = False,
    deterministic: bool = False,
) -> Model:
    """A model of random weights for benchmarks, N(0, 0.02²) with norms of 1: the same for the same seed and
    kind of device. `packed` and `deterministic` as in `load_model`."""
    model = _empty(config, dtype, device)
    norms = {id(module.weight) for module in model.modules() if isinstance(module, RMSNorm)}
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if id(parameter) not in norms:
            parameter.normal_(0.0, 0.02, generator=generator)
    if packed:
        model.pack(packing("none", dtype, everything=deterministic))
    return model


def read_config(weights: Path) -> ModelConfig:
    """The config of a checkpoint folder or a GGUF file, without its weights."""
    return config_from_folder(weights) if weights.is_dir() else config_of(read_header(weights))


def _empty(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Model:
    with torch.device(device):
        return FAMILIES[config.family](config, dtype).eval()


def shortened(config: ModelConfig, context_length: int | None) -> ModelConfig:
    """`config` with a smaller context; raises `InvalidRequest` where it is none."""
    if context_length is None:
        return config
    if not 1 <= context_length <= config.context_length:
        raise InvalidRequest(
            f"context_length is {context_length}; this model takes 1 to {config.context_length} tokens.",
            field="context_length",
        )
    return replace(config, context_length=context_length)
