"""Loads a checkpoint or GGUF file as a model that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ramify.errors import UnsupportedField
from ramify.kernels.weights.rows import Rows
from ramify.runtime.config import EngineConfig
from ramify.runtime.model.causal_lm import Attend, CausalLM
from ramify.runtime.model.checkpoint import ModelFiles, splits_of, weight_files
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.families.draft_heads import head_of
from ramify.runtime.model.families.gemma import Gemma2, Gemma3
from ramify.runtime.model.families.gpt_oss import GptOss
from ramify.runtime.model.families.llama import Llama
from ramify.runtime.model.families.olmo import Olmo2, Olmoe
from ramify.runtime.model.families.phi3 import Phi3
from ramify.runtime.model.families.qwen3 import Glm4Moe, Qwen3
from ramify.runtime.model.families.qwen3_next import Qwen3Next, Qwen35
from ramify.runtime.model.gguf.header import read_header
from ramify.runtime.model.gguf.weights import config_of, rotary_layout, tensors_in_file
from ramify.runtime.model.layers import RMSNorm
from ramify.runtime.model.packed_cache import load_packed
from ramify.runtime.model.quantised import quantised_tensors
from ramify.runtime.model.quantization import Quantization, packing
from ramify.runtime.model.shape.config import Family, ModelConfig, ModelShape
from ramify.runtime.model.shape.context import with_context
from ramify.runtime.model.shape.heads import HeadConfig
from ramify.runtime.model.shape.hf_config import config_from_folder
from ramify.runtime.model.weights import fill, tensors_in_folder

if TYPE_CHECKING:
    from ramify.runtime.model.transformers.trace import TracedShape

log = logging.getLogger(__name__)

__all__ = ["Attend", "Model", "dummy_model", "load_model", "read_config"]

ModelImpl = Literal["auto", "native", "transformers"]
RopeScaling = Mapping[str, Any] | None

FAMILIES: dict[Family, type[Model]] = {
    "llama": Llama,
    "mistral": Llama,  # all layers have a sliding window: ModelConfig.windows (arXiv 2310.06825)
    "qwen2": Llama,  # query, key and value projections have a bias: ModelConfig.qkv_bias (arXiv 2407.10671)
    "qwen3": Qwen3,
    "gemma2": Gemma2,
    "gemma3": Gemma3,
    "phi3": Phi3,
    "smollm3": Llama,  # every fourth layer has no positions: ModelConfig.layer_ropes (arXiv 2501.18795)
    "olmo2": Olmo2,
    "mixtral": Llama,
    "qwen2_moe": Llama,
    "qwen3_moe": Qwen3,
    "olmoe": Olmoe,
    "granitemoe": Llama,
    "granitemoeshared": Llama,
    "glm4_moe": Glm4Moe,
    "gpt_oss": GptOss,
    "qwen3_next": Qwen3Next,
    "qwen3_5": Qwen35,
    "qwen3_5_moe": Qwen35,
    "granite": Llama,  # multipliers of embedding, residuals, scores and logits: config.granite_shape
}


def load_model(
    files: ModelFiles,
    *,
    shape: ModelShape | None = None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    context_length: int | None = None,
    quantization: Quantization = "none",
    packed: bool = False,
    quantised: bool = False,
    deterministic: bool = False,
    packed_cache: int = int(EngineConfig.packed_cache_gb * 2**30),
) -> CausalLM:
    """The model in `files`, its weights converted to `dtype` on `device`.

    `shape` is the result of `read_shape`. None: `read_shape` is called here.
    `context_length` is that of `context.with_context`. The table of rotations has this length.

    With `packed`, or with any quantization, matrices are laid out for the compiled kernels, if there is a
    layout for their number format. Packed models are cached on disk, in at most `packed_cache` bytes. With
    `packed` and `deterministic` all matrices are packed, since the bits of torch's products depend on the
    number of rows.

    With `quantised` instead, quantised matrices are laid out on `device` for the kernels of GPUs.

    Raises `InvalidRequest` or `UnsupportedField` for a checkpoint that cannot be run.
    """
    config = with_context(shape or read_shape(files.weights), context_length)
    if not isinstance(config, ModelConfig):
        from ramify.runtime.model.transformers.backend import load_transformers

        return load_transformers(files.weights, config, dtype=dtype, device=device)
    form = packing(quantization, dtype, everything=packed and deterministic)
    if config.quantised is not None and quantization == "none":
        log.warning(
            "This checkpoint is quantised (%s). Its weights are dequantised to %s. They stay quantised "
            "with the cpu, triton and flashinfer attention backends, unless dtype is float32 or quantization "
            "is none.",
            config.quantised.method,
            dtype,
        )
    if quantization == "none" and not (packed and form):
        plain = _empty(config, dtype, device)
        _fill(plain, files.weights, quantised=False)
        return plain
    if quantised:
        if config.experts is not None and quantization in ("int8", "int4"):
            raise UnsupportedField(
                f"quantization is {quantization!r}, and there is no kernel for quantised experts on CUDA.",
                field="quantization",
                remedy="Leave it out.",
            )
        model = _empty(config, dtype, "cpu")
        model.lay_out_when_filled(form, device)
        _fill(model, files.weights, quantised=quantization in ("gguf", "checkpoint"))
        return model
    if str(device) != "cpu":
        raise UnsupportedField(
            f"quantization is {quantization!r}, for which the torch attention backend has no kernels.",
            field="quantization",
            remedy="Leave attention_backend out.",
        )

    def full() -> Model:
        model = _empty(config, dtype, device)
        model.pack_when_filled(form)
        _fill(model, files.weights, quantised=quantization in ("gguf", "checkpoint"))
        model.pack(form)
        return model

    paths = weight_files(files.weights) if files.weights.is_dir() else splits_of(files.weights)
    variant = f"{quantization}-{str(dtype).removeprefix('torch.')}"
    if deterministic and dtype == torch.float32:
        variant += "-whole"
    if isinstance(config, HeadConfig):
        variant += "-head"
    if config.shard.count > 1:
        variant += f"-{config.shard.index + 1}of{config.shard.count}"
    return load_packed(paths, variant, config, lambda: _empty(config, dtype, device), full, most=packed_cache)


def _fill(model: Model, weights: Path, *, quantised: bool) -> None:
    config, dtype = model.config, model.embedding.dtype
    if weights.is_dir():
        stored: Iterable[tuple[str, Tensor | Rows]] = tensors_in_folder(weights)
        if config.quantised is not None:
            stored = quantised_tensors(
                weights, config.quantised, lambda name: model.name_of(name) is not None
            )
        fill(model, stored, layout="halves", keep=quantised)
    else:
        tensors = tensors_in_file(read_header(weights), dtype, quantised=quantised)
        fill(model, tensors, layout=rotary_layout(config))


@torch.inference_mode()
def dummy_model(
    config: ModelShape,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    packed: bool = False,
    deterministic: bool = False,
) -> CausalLM:
    """A model with random weights for benchmarks: N(0, 0.02²), and norms of 1. Equal seeds on equal kinds of
    device give equal weights; on the meta device weights have no values. `packed` and `deterministic` are
    those of `load_model`."""
    if not isinstance(config, ModelConfig):
        from ramify.runtime.model.transformers.backend import dummy_transformers

        return dummy_transformers(config, dtype=dtype, device=device, seed=seed)
    model = _empty(config, dtype, device)
    if torch.device(device).type == "meta":
        return model
    norms = {id(module.weight) for module in model.modules() if isinstance(module, RMSNorm)}
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if id(parameter) not in norms:
            parameter.normal_(0.0, 0.02, generator=generator)
    if packed:
        model.pack(packing("none", dtype, everything=deterministic))
    return model


def read_config(weights: Path, rope_scaling: RopeScaling = None) -> ModelConfig:
    """The config of a checkpoint folder or a GGUF file of one of our families, without its weights.

    rope_scaling : `EngineConfig.rope_scaling`
    """
    if weights.is_dir():
        return config_from_folder(weights, rope_scaling)
    return config_of(read_header(weights), rope_scaling)


def read_shape(
    weights: Path, model_impl: ModelImpl = "auto", rope_scaling: RopeScaling = None
) -> ModelConfig | TracedShape:
    """The shape of a checkpoint folder or a GGUF file, without its weights.

    rope_scaling : `EngineConfig.rope_scaling`

    Raises `UnsupportedField` with the architecture and the reason if `model_impl` cannot run it.
    """
    if not weights.is_dir() and model_impl == "transformers":
        raise UnsupportedField(
            "model_impl is 'transformers', which does not read GGUF files.",
            field="model_impl",
            remedy="Leave it out, or give a folder of safetensors.",
        )
    refusal: UnsupportedField | None = None
    if model_impl != "transformers":
        try:
            return read_config(weights, rope_scaling)
        except UnsupportedField as error:
            if not weights.is_dir():
                raise
            if model_impl == "native":
                other = "Or leave --model-impl at auto, which can run a model by its code in transformers."
                remedy = f"{error.remedy or ''} {other}".strip()
                raise UnsupportedField(error.message, field=error.field, remedy=remedy) from error
            refusal = error
    from ramify.runtime.model.transformers.trace import shape_of_folder

    try:
        shape = shape_of_folder(weights, rope_scaling)
    except UnsupportedField as error:
        if refusal is None:
            raise
        both = f"{refusal.message} {error.message}"
        raise UnsupportedField(both, field=error.field, remedy=error.remedy) from error
    return shape if refusal is None else replace(shape, not_native=refusal.message)


BY_TRANSFORMERS = (
    "The model's code in transformers runs it instead: without GGUF files, quantised weights, adapters, CUDA "
    "graphs and equal bits."
)


def check_transformers(config: EngineConfig) -> EngineConfig:
    """`config` for a model run by transformers' code: with `model_impl` "transformers", and without
    `deterministic`.

    Raises `UnsupportedField` for an option that such a model cannot honour.
    """
    remedy = "Leave it out, or choose a model of our own families."
    refused = {
        "deterministic": "is set, but the products are torch's, and their bits depend on the batch",
        "cuda_graphs": "is set, but its code may read the device's values on the host",
    }
    for name, reason in refused.items():
        if getattr(config, name):
            raise UnsupportedField(
                f"{name} {reason}: this model's code is transformers'.", field=name, remedy=remedy
            )
    if config.quantization not in ("auto", "none"):
        raise UnsupportedField(
            f"quantization is {config.quantization!r}, and this model's code is transformers', whose weights "
            "stay in the model's dtype.",
            field="quantization",
            remedy=remedy,
        )
    return replace(config, deterministic=False, model_impl="transformers")


def _empty(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Model:
    with torch.device(device):
        if isinstance(config, HeadConfig):
            return head_of(config)(config, dtype).eval()
        return FAMILIES[config.family](config, dtype).eval()
