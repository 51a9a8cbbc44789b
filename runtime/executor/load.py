"""The weights that an engine loads, by its options."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ramify.errors import InvalidRequest
from ramify.kernels.registry import Ops
from ramify.runtime.config import EngineConfig
from ramify.runtime.model.causal_lm import CausalLM
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.loading.load import dummy_model, load_model
from ramify.runtime.model.packed_cache import bytes_of
from ramify.runtime.model.quantization import Quantization, resolve_quantization
from ramify.runtime.model.shape.config import ModelShape
from ramify.runtime.model.shape.context import with_context
from ramify.runtime.model.shape.heads import HeadConfig

log = logging.getLogger("ramify")

LoadModel = Callable[[torch.dtype, torch.device, Ops], CausalLM]
"""Function that loads a model in a dtype, on a device, for the kernels `Ops`."""
LoadDraft = Callable[[torch.dtype, torch.device, Ops], CausalLM | None]
"""Function that loads a draft model as `LoadModel` does; None if there is none that drafts."""


def loader(config: EngineConfig, files: ModelFiles, shape: ModelShape, context_length: int) -> LoadModel:
    """A function that loads the model from `files`. `shape` is the shape of the whole model, or of the part
    of one rank; then only that part is loaded."""

    def load(dtype: torch.dtype, device: torch.device, kernels: Ops) -> CausalLM:
        if config.load_format == "dummy":
            return dummy_model(
                with_context(shape, context_length),
                dtype=dtype,
                device=device,
                seed=config.seed,
                packed=kernels.prefers_packed,
                deterministic=kernels.deterministic,
            )
        return load_model(
            files,
            shape=shape,
            dtype=dtype,
            device=device,
            context_length=context_length,
            quantization=quantization_of(
                config, files, shape, packed=kernels.prefers_packed or kernels.quantised_matmul is not None
            ),
            packed=kernels.prefers_packed,
            quantised=kernels.quantised_matmul is not None,
            deterministic=kernels.deterministic,
            packed_cache=int(config.packed_cache_gb * 2**30),
        )

    return load


def own_head_loader(
    config: EngineConfig, files: ModelFiles, shape: HeadConfig, context_length: int
) -> LoadDraft:
    """A function that loads the draft head of shape `shape` in the model's own checkpoint.

    The engine runs without a head that nobody has named: if the head cannot be loaded, the function warns
    and returns None.
    """
    load = loader(config, files, shape, context_length)
    name = f"The {shape.family} draft head in {files.weights} ({shape.stored_at})"

    def load_or_warn(dtype: torch.dtype, device: torch.device, kernels: Ops) -> CausalLM | None:
        try:
            head = load(dtype, device, kernels)
        except InvalidRequest as error:
            log.warning(
                "%s is not used: %s --no-speculation leaves it out without this warning.", name, error.message
            )
            return None
        assert isinstance(head, Model)
        log.info("%s takes %d bytes; --no-speculation leaves it out.", name, bytes_of(head))
        return head

    return load_or_warn


def quantization_of(
    config: EngineConfig, files: ModelFiles, shape: ModelShape, *, packed: bool
) -> Quantization:
    """The format of the weights. `packed`: the kernels multiply by packed or quantised weights."""
    return resolve_quantization(
        "none" if config.quantization == "auto" and not packed else config.quantization,
        files.weights,
        exact=config.dtype == "float32",
        quantised=getattr(shape, "quantised", None),
    )
