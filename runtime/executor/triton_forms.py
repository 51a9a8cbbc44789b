"""Compiles the Triton kernels that a model's steps launch, before the first step.

For the GPU of this machine, or for a GPU that is not there:

    engine      model on the GPU   ──▶ warm-up, noted ──▶ forms that the cache lacks ──▶ compiled on all cores
    ramify pull model without data ──▶ the same
"""

from __future__ import annotations

import dataclasses
import logging
import time

import torch

from ramify.errors import UnsupportedField
from ramify.kernels.registry import Ops
from ramify.machine_code import keep_triton_kernels
from ramify.runtime.config import EngineConfig
from ramify.runtime.cores import usable_cores
from ramify.runtime.executor.attention import has_cascade
from ramify.runtime.executor.device import capability_of, resolve_dtype, resolve_page_dtype, triton_ops
from ramify.runtime.executor.kv_pool import StatePool, pool_for
from ramify.runtime.executor.load import loader, quantization_of
from ramify.runtime.executor.memory import LEAST_STATES, with_defaults
from ramify.runtime.executor.runner import MANY_ROWS, Compiled, Runner
from ramify.runtime.model.causal_lm import CausalLM
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import read_shape
from ramify.runtime.model.shape.config import ModelConfig
from ramify.runtime.model.shape.context import with_context
from ramify.runtime.parallel.checks import check_ranks, part_for

log = logging.getLogger("ramify")


def compile_warm_up(
    config: EngineConfig, model: CausalLM, kernels: Ops, dtype: torch.dtype, device: torch.device
) -> Compiled:
    """Compile, on all cores, every form that a warm-up of `model` asks for and Triton's cache lacks.

    device : the model's: a CUDA device, or inside `ahead.absent` the meta device, whose tensors have no data

    A form that does not compile is logged. Its launch fails with the compiler's message.
    """
    from ramify.kernels.triton import ahead

    began, capability = time.monotonic(), capability_of(device)
    assert capability is not None
    runner = _on_few_pages(config, model, kernels, dtype, device)
    with ahead.noting() as forms:
        runner.warm_up()
    lacking, failures = ahead.missing(forms), []
    if lacking:
        cores = len(usable_cores())
        log.warning(
            "Compiling %d Triton kernels for sm_%d on %d cores, once.", len(lacking), capability, cores
        )
        failures = ahead.compile_forms(lacking, capability, processes=cores)
        for failure in failures:
            log.error("A Triton kernel does not compile: %s", failure)
    failed = len(failures)
    return Compiled(len(forms), len(lacking) - failed, failed, time.monotonic() - began)


def compile_for_absent_gpu(config: EngineConfig, files: ModelFiles, capability: int) -> Compiled:
    """Compile the kernels of an engine with these options, for a GPU that need not be there.

    Reads only the files of quantised weights, because the layout of these weights decides about forms.

    capability : compute capability of the GPU. Tiles are chosen for the card in `CARDS` of this capability,
        or else of the next lower one.

    Raises `UnsupportedField` for a model without a native implementation, and for options that the GPU does
    not support.
    """
    from ramify.kernels.triton import ahead

    keep_triton_kernels()
    config = with_defaults(config, 0)
    shape = read_shape(files.weights, config.model_impl)
    if not isinstance(shape, ModelConfig):
        raise UnsupportedField(
            f"the {shape.family} model runs through transformers, whose kernels cannot be compiled ahead.",
            field="model",
            remedy="An engine on the GPU compiles them at its start.",
        )
    check_ranks(config, shape, files.weights)
    part = part_for(shape, 0, config.tensor_parallel)
    if quantization_of(config, files, shape, packed=True) == "none":
        config = dataclasses.replace(config, load_format="dummy")  # forms depend on no number in the files
    meta = torch.device("meta")
    with ahead.absent(capability), torch.inference_mode():
        dtype = resolve_dtype(config, meta)
        resolve_page_dtype(config, "triton", meta, dtype)
        kernels = triton_ops(config, meta)
        context = with_context(shape, config.context_length).context_length
        load = loader(config, files, part, context)
        return compile_warm_up(config, load(dtype, meta, kernels), kernels, dtype, meta)


def _on_few_pages(
    config: EngineConfig, model: CausalLM, kernels: Ops, dtype: torch.dtype, device: torch.device
) -> Runner:
    shape = model.config
    assert config.page_size is not None
    pool = pool_for(config, shape, MANY_ROWS[0] // config.page_size + 2, dtype, device)
    states = None if shape.states is None else StatePool(shape.states, num_slots=LEAST_STATES, device=device)
    cascade = has_cascade(kernels) if config.cascade is None else config.cascade
    return Runner(model, pool, kernels, cascade=cascade, states=states)
