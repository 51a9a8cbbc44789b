"""The operations of a backend and their types; `ops` chooses a backend by name.

A protocol states the signature that mypy holds every backend to. The function of the same name under
`kernels.reference` states the contract: shapes, dtypes, meaning, errors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from ramify.kernels.arguments.gated_delta import DeltaWeights
from ramify.kernels.arguments.sampling_inputs import LogitEdits, LogProbabilities, SamplingOptions
from ramify.kernels.machine.errors import KernelUnavailable
from ramify.kernels.reference import logits as reference_logits
from ramify.kernels.reference.kv_store import copy_pages
from ramify.kernels.reference.lora import lora as reference_lora
from ramify.kernels.trials import Trial
from ramify.kernels.weights.lora import Extra, LoraRows, LoraTable
from ramify.kernels.weights.packed import PackedWeight
from ramify.kernels.weights.quantised import QuantisedWeight, Rounded
from ramify.kernels.weights.stack import ExpertMatrices, LayerWeights, PackedExperts

if TYPE_CHECKING:
    from ramify.kernels.cpu.layer_stack import LayerStack
    from ramify.kernels.flashinfer import FlashInferPlanner
    from ramify.kernels.triton.planner import Planner


CopyPages = Callable[[Tensor, Tensor, Sequence[int], Sequence[int]], None]
EditLogits = Callable[[Tensor, LogitEdits], Tensor]
RestoreLogits = Callable[[Tensor, LogitEdits, Tensor], None]
LogProbabilitiesOf = Callable[[Tensor, Tensor, int], LogProbabilities]
SoftCap = Callable[[Tensor, float], Tensor]
LogSum = Callable[[Tensor], Tensor]


class PagedAttention(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        page_table: Tensor,
        query_starts: Tensor,
        kv_lens: Tensor,
        *,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...


class PromptAttention(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        page_table: Tensor,
        lens: Sequence[int],
        *,
        scale: float,
    ) -> Tensor: ...


class RopeStoreKv(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        slots: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> None: ...


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor: ...


class Linear(Protocol):
    def __call__(
        self,
        x: Tensor,
        weight: PackedWeight,
        *,
        norm: tuple[Tensor, float] | None = None,
        out: Tensor | None = None,
        add: bool = False,
        extra: Extra | None = None,
    ) -> Tensor: ...


class Lora(Protocol):
    def __call__(
        self,
        x: Tensor,
        table: LoraTable,
        rows: LoraRows,
        *,
        out: Tensor,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor: ...


class MaskedLinear(Protocol):
    def __call__(
        self,
        x: Tensor,
        weight: PackedWeight,
        mask: Tensor,
        mask_rows: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor: ...


class MatMul(Protocol):
    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
        add: bool = False,
    ) -> Tensor: ...


class QuantisedMatMul(Protocol):
    def __call__(
        self,
        x: Tensor,
        weight: QuantisedWeight,
        bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
        add: bool = False,
    ) -> Tensor: ...


class NormFloat8(Protocol):
    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        matrix: QuantisedWeight,
        *,
        residual: Tensor | None = None,
    ) -> Rounded: ...


class GateFloat8(Protocol):
    def __call__(self, x: Tensor, matrix: QuantisedWeight, *, gelu: bool = False) -> Rounded: ...


class MultiplyFloat8(Protocol):
    def __call__(
        self,
        x: Rounded,
        matrix: QuantisedWeight,
        bias: Tensor | None = None,
        *,
        out: Tensor,
        add: bool = False,
    ) -> Tensor: ...


class Mixture(Protocol):
    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        experts: ExpertMatrices,
        *,
        out: Tensor | None = None,
        add: bool = False,
    ) -> Tensor: ...


class ExpertBlock(Protocol):
    def __call__(
        self,
        x: Tensor,
        experts: PackedExperts,
        *,
        norm: tuple[Tensor, float] | None = None,
        out: Tensor | None = None,
        add: bool = False,
    ) -> Tensor: ...


class AddRmsNorm(Protocol):
    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
    ) -> Tensor: ...


class GatedActivation(Protocol):
    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor: ...


class GatedDeltaRule(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        weights: DeltaWeights,
        conv: Tensor,
        recurrent: Tensor,
        slots: Tensor,
        query_starts: Tensor,
        kv_lens: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor: ...


class OutputGate(Protocol):
    def __call__(
        self,
        x: Tensor,
        gate: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...


class SampleTokens(Protocol):
    def __call__(
        self,
        logits: Tensor,
        options: SamplingOptions,
        mask: Tensor | None = None,
        mask_rows: Tensor | None = None,
    ) -> Tensor: ...


class MakeLayerStack(Protocol):
    """See `cpu.layer_stack.LayerStack`."""

    def __call__(
        self,
        layers: Sequence[LayerWeights],
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        heads: int,
        cascade: bool = True,
    ) -> LayerStack: ...


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingOps:
    """The operations from logits to tokens, on the device of the logits: only tokens leave the device."""

    edit_logits: EditLogits
    restore_logits: RestoreLogits
    sample_tokens: SampleTokens
    log_probabilities: LogProbabilitiesOf


@dataclasses.dataclass(frozen=True, slots=True)
class Float8Ops:
    """Norms and gated activations that round their result to float8 themselves, and products of it."""

    norm_float8: NormFloat8
    gate_float8: GateFloat8
    multiply_float8: MultiplyFloat8


@dataclasses.dataclass(frozen=True, slots=True)
class Ops:
    """The operations of one backend. An operation has one signature and one meaning in every backend."""

    paged_attention: PagedAttention
    copy_pages: CopyPages
    rope_store_kv: RopeStoreKv
    rms_norm: RmsNorm
    gated_delta_rule: GatedDeltaRule
    output_gate: OutputGate
    linear: Linear | None = None
    """Products with packed weights; None if the backend has no packed weights."""
    flat_attention: PagedAttention | None = None
    """`paged_attention` without a cascade; None if `paged_attention` never has a cascade."""
    prefers_packed: bool = False
    """Whether `linear` is faster than torch's product with unpacked weights."""
    masked_linear: MaskedLinear | None = None
    """`linear` for rows that need only the outputs that masks allow; None if skipping the others saves no
    time."""
    add_rms_norm: AddRmsNorm | None = None
    silu_mul: GatedActivation | None = None
    gelu_mul: GatedActivation | None = None
    soft_cap: SoftCap = reference_logits.soft_cap
    """The soft cap of logits, in place."""
    log_sum: LogSum = reference_logits.log_sum
    """The log-sum-exp of each row of logits. The runtime subtracts it from logits to get
    log-probabilities."""
    sampling: SamplingOps | None = None
    """Sampling on the device of the logits; None if the runtime samples on the host, with `sample_tokens`."""
    planner: type[Planner] | None = None
    """Attention in two halves: a plan made on the host once a step, and launches for each layer. None if
    `paged_attention` does both, or with `flashinfer`."""
    prompt_attention: PromptAttention | None = None
    """Attention of steps of whole prompts in place of `planner`'s; None if `planner` does them."""
    flashinfer: type[FlashInferPlanner] | None = None
    """FlashInfer's attention in place of `planner`, without cascades and CUDA graphs; else None."""
    matmul: MatMul | None = None
    """Products with unpacked weights; None if torch's own are used."""
    quantised_matmul: QuantisedMatMul | None = None
    """Products with quantised weights in the layout for GPUs; None if the backend has no such layout."""
    float8: Float8Ops | None = None
    """Rounding to float8 as part of norms and activations; None if `quantised_matmul` rounds."""
    mixture: Mixture | None = None
    """Mixtures of unpacked experts; None if torch's own products are used."""
    expert_block: ExpertBlock | None = None
    """The operation that computes a mixture-of-experts block, router included, on packed weights; None if the
    backend has no packed weights."""
    layer_linear: Linear | None = None
    """The product for layers, if only the LM head is to use `linear`; None if layers use `linear` as well."""
    sample_tokens: SampleTokens | None = None
    """Sampling of float32 logits, for the runtime's host sampler; None if the backend has `sampling`."""
    layer_stack: MakeLayerStack | None = None
    """All layers in one call, for packed weights; None if layers are called one by one."""
    lora: Lora = reference_lora
    """The adapters of several requests in one product."""
    deterministic: bool = False
    """Whether results do not depend on the rest of the batch, to the bit: the result of a row depends only on
    that row, and that of attention only on a query and on the keys and values that the query sees."""


def ops(
    backend: Literal["cpu", "torch", "triton", "flashinfer"],
    *,
    deterministic: bool = False,
    int8: bool = False,
    float8: bool = False,
    trials: Collection[Trial] = (),
) -> Ops:
    """The operations of `backend`.

    deterministic : choose kernels whose bits do not depend on the batch
    int8 : the cpu backend may round activations to int8 for products with int8 or int4 weights of layers, and
        to int16 for products with any int8 weights. It may round softmax weights to bfloat16.
    float8 : the triton and flashinfer backends may round activations to float8 for products with float8
        weights whose checkpoint asks for it
    trials : kernels that the triton and flashinfer backends are to use although no card has timed them

    cpu: kernels compiled for this machine's processor. The first call on a machine takes seconds to compile
        them, later calls 0.3 s to load them; no other call compiles.
    torch: the reference implementations.
    triton: kernels for NVIDIA GPUs. Each is compiled in seconds at its first call with a model's shapes and
        dtypes, and cached on disk.
    flashinfer: attention by FlashInfer, the rest as triton.

    Raises
    ------
    KernelUnavailable
        The backend's kernels cannot run here, or have no deterministic form.
    ValueError
        No such backend.
    """
    if backend == "cpu":
        try:
            from ramify.kernels.cpu import (
                attention,
                experts,
                gated_delta,
                layer_stack,
                linear,
                linear_masked,
                lora,
                rope,
                rowwise,
            )
            from ramify.kernels.cpu import sampling as drawing
        except ImportError as error:
            raise KernelUnavailable(
                f"the compiled kernels cannot be loaded: {error}. The torch attention backend needs "
                "no compiler."
            ) from error
        return Ops(
            functools.partial(attention.paged_attention, rounded=int8),
            copy_pages,
            rope.rope_store_kv,
            rowwise.rms_norm,
            gated_delta.gated_delta_rule,
            gated_delta.output_gate,
            functools.partial(linear.linear, by_row=deterministic, int16=int8),
            prefers_packed=True,
            flat_attention=functools.partial(attention.paged_attention, cascade=False, rounded=int8),
            masked_linear=functools.partial(linear_masked.masked_linear, by_row=deterministic, int16=int8),
            expert_block=functools.partial(experts.expert_block, by_row=deterministic, int8=int8),
            layer_linear=functools.partial(linear.linear, by_row=deterministic, int8=True) if int8 else None,
            silu_mul=rowwise.silu_mul,
            gelu_mul=rowwise.gelu_mul,
            soft_cap=rowwise.soft_cap,
            log_sum=rowwise.log_sum,
            sample_tokens=drawing.sample_tokens,
            layer_stack=functools.partial(layer_stack.LayerStack, by_row=deterministic, int8=int8),
            lora=lora.lora,
            deterministic=deterministic,
        )
    if backend == "torch":
        if deterministic:
            raise KernelUnavailable(
                "the torch attention backend has no deterministic form; the cpu and triton backends have one."
            )
        return _torch_ops()
    if backend == "triton":
        return _triton_ops(deterministic, float8, trials)
    if backend == "flashinfer":
        if deterministic:
            raise KernelUnavailable("the flashinfer attention backend has no deterministic form.")
        from ramify.kernels.flashinfer import FlashInferPlanner, library

        library()
        return dataclasses.replace(
            _triton_ops(False, float8, trials), planner=None, flashinfer=FlashInferPlanner
        )
    raise ValueError(f"there is no backend {backend!r}; choose 'cpu', 'torch', 'triton' or 'flashinfer'.")


def _torch_ops() -> Ops:
    from ramify.kernels.reference import (
        activation,
        attention,
        gated_delta,
        linear,
        logits,
        norm,
        rope,
        sampling,
    )

    return Ops(
        attention.paged_attention,
        copy_pages,
        rope.rope_store_kv,
        norm.rms_norm,
        gated_delta.gated_delta_rule,
        gated_delta.output_gate,
        linear.linear,
        masked_linear=linear.masked_linear,
        add_rms_norm=norm.add_rms_norm,
        silu_mul=activation.silu_mul,
        gelu_mul=activation.gelu_mul,
        sampling=SamplingOps(
            logits.edit_logits,
            logits.restore_logits,
            sampling.sample_tokens,
            logits.log_probabilities,
        ),
    )


def _triton_ops(deterministic: bool, rounds: bool, trials: Collection[Trial]) -> Ops:
    try:
        from ramify.kernels.triton.tiles import launch
    except ImportError as error:
        raise KernelUnavailable(f"the Triton kernels cannot be loaded: {error}.") from error

    if not launch.INTERPRETED and launch.absent_capability is None and not torch.cuda.is_available():
        raise KernelUnavailable(
            "the Triton kernels need a CUDA device, and torch.cuda.is_available() is False. The cpu and "
            "torch attention backends need none; with TRITON_INTERPRET=1 Triton's interpreter runs them."
        )
    from ramify.kernels.triton import (
        activation,
        attention,
        experts,
        float8,
        gated_delta,
        kv_store,
        logits,
        lora,
        matmul,
        norm,
        planner,
        quantised,
        rope,
    )
    from ramify.kernels.triton import sampling as drawing
    from ramify.kernels.triton.trials import chunked_delta, prompts, rounding, skinny

    def small(kernel: Any) -> Any:
        return functools.partial(kernel, dependent=True) if "dependent-launch" in trials else kernel

    fused = None
    if "fused-rounding" in trials and rounds:
        multiply = functools.partial(float8.multiply_float8, by_row=deterministic)
        fused = Float8Ops(small(rounding.norm_float8), small(rounding.gate_float8), multiply)
    return Ops(
        attention.paged_attention,
        kv_store.copy_pages,
        small(rope.rope_store_kv),
        small(norm.rms_norm),
        (chunked_delta if "chunked-delta" in trials else gated_delta).gated_delta_rule,
        gated_delta.output_gate,
        add_rms_norm=small(norm.add_rms_norm),
        silu_mul=small(activation.silu_mul),
        gelu_mul=small(activation.gelu_mul),
        sampling=SamplingOps(
            logits.edit_logits,
            logits.restore_logits,
            drawing.sample_tokens,
            logits.log_probabilities,
        ),
        planner=planner.Planner,
        prompt_attention=prompts.prompt_attention if "library-prompts" in trials else None,
        matmul=skinny.matmul if "skinny-products" in trials else matmul.matmul if deterministic else None,
        quantised_matmul=functools.partial(
            float8.rounding_matmul if rounds else quantised.quantised_matmul, by_row=deterministic
        ),
        float8=fused,
        mixture=functools.partial(experts.mixture, by_row=deterministic),
        lora=lora.lora,
        deterministic=deterministic,
    )
