"""Resolves device, kernels and dtype from a configuration, and refuses what this machine cannot do."""

from __future__ import annotations

import logging
import os
from typing import Literal

import torch

from ramify.errors import UnsupportedField
from ramify.kernels.machine.errors import KernelUnavailable
from ramify.kernels.registry import Ops, ops
from ramify.kernels.trials import UNFIXED, Trial
from ramify.runtime.compile_ahead import compile_kernels
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.kv_pool import page_dtype_of
from ramify.runtime.model.shape.config import ModelShape

log = logging.getLogger("ramify")

Backend = Literal["cpu", "torch", "triton", "flashinfer"]

FLOAT8 = 89
"""The least compute capability whose matrix units multiply float8."""


def resolve_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """The device of rank `rank`. Makes this device torch's current device.

    Raises `UnsupportedField` if cuda is asked for and torch finds no CUDA device, or fewer CUDA devices than
    ranks.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UnsupportedField(
            "device is 'cuda', but torch finds no CUDA device here: torch.cuda.is_available() is False.",
            field="device",
            remedy="Choose cpu, or look at the driver and at whether this torch was built with CUDA.",
        )
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    if config.tensor_parallel > 1:
        found = torch.cuda.device_count()
        if found < config.tensor_parallel:
            raise UnsupportedField(
                f"tensor_parallel is {config.tensor_parallel}, and this process can use {found} GPUs; each "
                "rank needs one.",
                field="tensor_parallel",
                remedy="Ask for as many ranks as there are GPUs, or for device='cpu'.",
            )
        torch.cuda.set_device(rank)
    return torch.device("cuda", torch.cuda.current_device())


def capability_of(device: torch.device) -> int | None:
    """Compute capability, such as 90, of a CUDA device, or of the absent GPU that a meta device represents;
    None for the CPU."""
    if device.type == "meta":
        from ramify.kernels.triton.tiles import launch

        return launch.absent_capability
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The model's dtype by `config`. "auto": bfloat16, or float32 where it is faster: on GPUs and, for
    torch's products, on CPUs that cannot multiply bfloat16. The compiled CPU kernels read bfloat16 faster on
    any CPU."""
    if config.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    capability = capability_of(device)
    if capability is not None:
        native = capability >= 80
    elif config.attention_backend == "torch" or config.model_impl == "transformers":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        native = True
    return torch.bfloat16 if native else torch.float32


def resolve_page_dtype(
    config: EngineConfig, backend: Backend, device: torch.device, dtype: torch.dtype
) -> torch.dtype:
    """The dtype of the KV pages of a model of `dtype`.

    Raises `UnsupportedField` if the backend or the device does not support fp8 or int8.
    """
    reason = None
    if config.kv_cache_dtype == "int8" and backend in ("triton", "flashinfer"):
        raise UnsupportedField(
            f"kv_cache_dtype is 'int8', and the {backend} attention backend has no int8 pages.",
            field="kv_cache_dtype",
            remedy="Choose fp8, which GPUs of compute capability 8.9 and later have, or leave it out.",
        )
    if config.kv_cache_dtype != "fp8":
        return page_dtype_of(config, dtype)
    if backend == "cpu":
        reason = "the cpu attention backend reads pages in the model's dtype"
    elif backend == "flashinfer":
        reason = "the flashinfer attention backend reads pages in the model's dtype here"
    elif backend == "triton" and (capability_of(device) or FLOAT8) < FLOAT8:
        reason = "this GPU's compute capability is below 8.9"
    if reason is not None:
        raise UnsupportedField(
            f"kv_cache_dtype is 'fp8', and {reason}.",
            field="kv_cache_dtype",
            remedy="Choose int8."
            if backend == "cpu"
            else "Leave it out. The triton backend has it on Ada, Hopper and later GPUs.",
        )
    return page_dtype_of(config, dtype)


def resolve_ops(config: EngineConfig, device: torch.device) -> tuple[Backend, Ops]:
    """The backend for `device`, and its kernels.

    "auto" falls back to the torch kernels if the compiled CPU kernels cannot run. Raises `UnsupportedField`
    if the configured backend cannot run on the device.
    """
    backend = config.attention_backend
    if config.trial and not (
        backend in ("triton", "flashinfer") or (backend, device.type) == ("auto", "cuda")
    ):
        raise UnsupportedField(
            f"trial is {config.trial[0]!r}, of the triton and flashinfer backends, and the attention "
            f"backend is {backend!r} on the device {device.type}.",
            field="trial",
            remedy="Leave it out, or choose triton on a CUDA device.",
        )
    if backend == "auto":
        if device.type == "cuda":
            return "triton", triton_ops(config, device)
        try:
            return "cpu", cpu_ops(config)
        except KernelUnavailable as error:
            if config.deterministic:
                raise _indeterminate() from error
            log.warning("attention runs on the slow torch backend: %s", error)
            return "torch", ops("torch")
    if backend == "cpu" and device.type != "cpu":
        raise UnsupportedField(
            f"attention_backend is 'cpu', whose kernels cannot read the memory of device {device.type}.",
            field="attention_backend",
            remedy="Choose triton or torch, or device cpu.",
        )
    # Asking the environment instead of Triton saves importing it, which takes half a second.
    if backend == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedField(
            "attention_backend is 'triton', which needs a CUDA device; the device is the CPU.",
            field="attention_backend",
            remedy="Choose cpu or torch. With TRITON_INTERPRET=1 in the environment Triton's interpreter "
            "runs the kernels, for tests.",
        )
    if backend == "torch" and config.deterministic:
        raise _indeterminate()
    if backend == "flashinfer":
        return backend, flashinfer_ops(config, device)
    if backend == "cpu":
        return backend, cpu_ops(config)
    return backend, ops("torch") if backend == "torch" else triton_ops(config, device)


def triton_ops(config: EngineConfig, device: torch.device) -> Ops:
    """The Triton kernels, with the options of `config`. Activations become float8 if `device` multiplies
    float8 natively, from compute capability 8.9 on."""
    check_trials(config, device)
    return ops(
        "triton",
        deterministic=bool(config.deterministic),
        float8=_rounds(config, device),
        trials=config.trial,
    )


def check_trials(config: EngineConfig, device: torch.device, shape: ModelShape | None = None) -> None:
    """Raise `UnsupportedField` for a trial that can have no effect on `device` or on a model of `shape`, or
    that contradicts an option."""
    reasons: dict[Trial, str] = {}
    if config.deterministic:
        reasons |= dict.fromkeys(UNFIXED, "deterministic is set: its bits depend on the batch or on chunks")
    if config.attention_backend == "flashinfer":
        reasons["library-prompts"] = "attention_backend is 'flashinfer'"
    dequantised = config.dtype == "float32" or config.quantization == "none"
    if dequantised or not _rounds(config, device):
        reasons["fused-rounding"] = (
            "activations are not rounded to float8: that needs a GPU of compute capability 8.9 or later, and "
            "neither exact_activations, dtype float32 nor quantization none"
        )
    elif shape is not None:
        quantised = getattr(shape, "quantised", None)  # the shape of a model by transformers' code has none
        if quantised is None or not quantised.any_float8_activations:
            reasons["fused-rounding"] = "this checkpoint has no FP8 weights with activations in float8"
    if (capability_of(device) or 0) < 90:
        reasons["dependent-launch"] = "it needs a GPU of compute capability 9.0 or later"
    if shape is not None and shape.states is None:
        reasons["chunked-delta"] = "this model has no linear attention layers"
    if shape is not None and (
        shape.head_dim > 128 or shape.attention_soft_cap or all(shape.sinks or (False,))
    ):
        reasons["library-prompts"] = "cuDNN has no heads above 128 numbers, soft cap or sinks"
    for trial in config.trial:
        if trial in reasons:
            raise UnsupportedField(
                f"trial is {trial!r}, and {reasons[trial]}.", field="trial", remedy="Leave it out."
            )


def _rounds(config: EngineConfig, device: torch.device) -> bool:
    """Whether activations are rounded to float8 for products with float8 weights."""
    return (capability_of(device) or 0) >= FLOAT8 and not config.exact_activations


def flashinfer_ops(config: EngineConfig, device: torch.device) -> Ops:
    """FlashInfer's attention, with all other kernels as in `triton_ops`. Raises `UnsupportedField` if
    FlashInfer cannot run."""
    if device.type != "cuda":
        raise UnsupportedField(
            f"attention_backend is 'flashinfer', which needs a CUDA device; the device is {device.type}.",
            field="attention_backend",
            remedy="Choose cpu or torch.",
        )
    if config.deterministic:
        raise UnsupportedField(
            "deterministic is set, and attention_backend is 'flashinfer', whose bits depend on the batch.",
            field="deterministic",
            remedy="Choose triton.",
        )
    try:
        check_trials(config, device)
        return ops("flashinfer", float8=_rounds(config, device), trials=config.trial)
    except KernelUnavailable as error:
        raise UnsupportedField(
            f"attention_backend is 'flashinfer', and {error}",
            field="attention_backend",
            remedy="pip install 'ramify-llm[flashinfer]', or choose triton.",
        ) from error


def check_attention(config: EngineConfig, shape: ModelShape, dtype: torch.dtype) -> None:
    """Raise `UnsupportedField` if the chosen backend lacks a feature of the model's attention."""
    if config.attention_backend != "flashinfer":
        return
    from ramify.kernels.flashinfer import HEAD_DIMS

    lacks = []
    if shape.head_dim not in HEAD_DIMS:
        lacks.append(f"heads of {shape.head_dim} numbers (it has {', '.join(map(str, HEAD_DIMS))})")
    if any(shape.sinks):
        lacks.append("attention sinks")  # its wrappers take them, and most of its kernels ignore them
    if dtype not in (torch.bfloat16, torch.float16):
        lacks.append(f"dtype {str(dtype).removeprefix('torch.')}")
    if lacks:
        raise UnsupportedField(
            f"attention_backend is 'flashinfer', which lacks what this model needs: {'; '.join(lacks)}.",
            field="attention_backend",
            remedy="Choose triton, or leave it out.",
        )


def cpu_ops(config: EngineConfig) -> Ops:
    """The compiled CPU kernels, with the options of `config`."""
    compile_kernels()
    deterministic = config.deterministic
    if deterministic is None:
        deterministic = not _uses_tiles(resolve_dtype(config, torch.device("cpu")))
        if not deterministic:
            log.info(
                "Outputs may differ between runs in their last bits: products of many rows go through "
                "AMX. --deterministic makes them equal, with a slower prefill."
            )
    rounds = not config.exact_activations and config.dtype != "float32"
    return ops("cpu", deterministic=deterministic, int8=rounds)


def _uses_tiles(dtype: torch.dtype) -> bool:
    """Whether products of `dtype` use AMX tiles. The kernel then depends on the number of rows."""
    try:
        from ramify.kernels.cpu.linear import tiles_allowed
    except ImportError:  # `ops` says what is missing
        return False
    return dtype == torch.bfloat16 and tiles_allowed()


def _indeterminate() -> UnsupportedField:
    return UnsupportedField(
        "deterministic is set, and the torch attention backend has no form for it.",
        field="deterministic",
        remedy="Choose the attention backend cpu, or triton on a CUDA device.",
    )
