"""Which implementation of the operations a runtime uses: chosen once, by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from ramify.kernels.errors import KernelUnavailable
from ramify.kernels.packed import PackedWeight
from ramify.kernels.sampling_inputs import LogitEdits, LogProbabilities, SamplingOptions
from ramify.kernels.stack import LayerWeights

if TYPE_CHECKING:
    from ramify.kernels.triton.planner import Planner


class PagedAttention(Protocol):
    """See `reference.attention.paged_attention`."""

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
        out: Tensor | None = None,
    ) -> Tensor: ...


class StoreKv(Protocol):
    """See `reference.kv_store.store_kv`."""

    def __call__(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None: ...


class CopyPages(Protocol):
    """See `reference.kv_store.copy_pages`."""

    def __call__(self, k_pages: Tensor, v_pages: Tensor, src: Sequence[int], dst: Sequence[int]) -> None: ...


class RopeStoreKv(Protocol):
    """See `reference.rope.rope_store_kv`."""

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
    """See `reference.norm.rms_norm`."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor: ...


class Linear(Protocol):
    """See `reference.linear.linear`."""

    def __call__(
        self,
        x: Tensor,
        weight: PackedWeight,
        *,
        norm: tuple[Tensor, float] | None = None,
        out: Tensor | None = None,
        add: bool = False,
    ) -> Tensor: ...


class MaskedLinear(Protocol):
    """See `reference.linear.masked_linear`."""

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
    """See `reference.matmul.matmul`."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
        add: bool = False,
    ) -> Tensor: ...


class AddRmsNorm(Protocol):
    """See `reference.norm.add_rms_norm`."""

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
    ) -> Tensor: ...


class GatedActivation(Protocol):
    """See `reference.activation`."""

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor: ...


class ApplyMask(Protocol):
    """See `reference.logits.apply_mask`."""

    def __call__(self, logits: Tensor, mask: Tensor, mask_rows: Tensor | None = None) -> None: ...


class EditLogits(Protocol):
    """See `reference.logits.edit_logits`."""

    def __call__(self, logits: Tensor, edits: LogitEdits) -> Tensor: ...


class RestoreLogits(Protocol):
    """See `reference.logits.restore_logits`."""

    def __call__(self, logits: Tensor, edits: LogitEdits, before: Tensor) -> None: ...


class SampleTokens(Protocol):
    """See `reference.sampling.sample_tokens`."""

    def __call__(
        self,
        logits: Tensor,
        options: SamplingOptions,
        mask: Tensor | None = None,
        mask_rows: Tensor | None = None,
    ) -> Tensor: ...


class LogProbabilitiesOf(Protocol):
    """See `reference.logits.log_probabilities`."""

    def __call__(self, logits: Tensor, tokens: Tensor, top: int) -> LogProbabilities: ...


class LayerStack(Protocol):
    """See `cpu.layer_stack.LayerStack.__call__`."""

    def __call__(
        self,
        x: Tensor,
        rotation: Tensor,
        slots: Tensor,
        page_table: Tensor,
        query_starts: Tensor,
        kv_lens: Tensor,
        *,
        scale: float,
    ) -> None: ...


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
    """From logits to tokens, where the logits lie: only R tokens leave the device."""

    edit_logits: EditLogits
    restore_logits: RestoreLogits
    sample_tokens: SampleTokens
    log_probabilities: LogProbabilitiesOf


@dataclasses.dataclass(frozen=True, slots=True)
class Ops:
    """The operations of one backend. All have the same signatures and meaning in every backend."""

    paged_attention: PagedAttention
    store_kv: StoreKv
    copy_pages: CopyPages
    rope_store_kv: RopeStoreKv
    rms_norm: RmsNorm
    apply_mask: ApplyMask
    linear: Linear | None = None
    """None where weights cannot be packed."""
    flat_attention: PagedAttention | None = None
    """`paged_attention` without a cascade; None where that has none by itself."""
    prefers_packed: bool = False
    """Whether `linear` is faster than torch's product with weights that are not packed."""
    masked_linear: MaskedLinear | None = None
    """None where leaving out what masks forbid saves nothing."""
    add_rms_norm: AddRmsNorm | None = None
    silu_mul: GatedActivation | None = None
    gelu_mul: GatedActivation | None = None
    sampling: SamplingOps | None = None
    """None where the runtime's own sampler does it, on the host."""
    planner: type[Planner] | None = None
    """Attention in two halves: a plan on the host once a step, and launches for each layer. None where
    `paged_attention` does both."""
    matmul: MatMul | None = None
    """Products with weights that are not packed; None where torch's are taken."""
    layer_linear: Linear | None = None
    """In layers instead of `linear`, which then is the head's; None where `linear` is."""
    sample_tokens: SampleTokens | None = None
    """For the runtime's own sampler, from float32 logits; part of `sampling` where there is that."""
    layer_stack: MakeLayerStack | None = None
    """All layers in one call, for packed weights; None where layers are called one by one."""
    deterministic: bool = False
    """The bits of a row depend on that row alone, and those of attention on what its query sees."""


def ops(
    backend: Literal["cpu", "torch", "triton"], *, deterministic: bool = False, int8: bool = False
) -> Ops:
    """The operations of `backend`, if `deterministic` in the forms whose bits do not depend on the batch.

    With `int8` the cpu backend may round to int8 what the layers multiply int8 and int4 weights with.

    cpu: compiled kernels for this machine. Takes seconds the first time on a machine, 0.3 s from then on;
        nothing is compiled later.
    torch: the reference twins.
    triton: kernels for NVIDIA GPUs, each compiled when it is first called with a model's shapes and dtypes,
        in seconds, and kept on disk.

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
                kv_store,
                layer_stack,
                linear,
                linear_masked,
                logits,
                norm,
                rope,
            )
            from ramify.kernels.cpu import sampling as drawing
        except ImportError as error:
            raise KernelUnavailable(
                f"the compiled kernels cannot be loaded: {error}. The torch attention backend needs "
                "no compiler."
            ) from error
        return Ops(
            attention.paged_attention,
            kv_store.store_kv,
            kv_store.copy_pages,
            rope.rope_store_kv,
            norm.rms_norm,
            logits.apply_mask,
            linear.row_linear if deterministic else linear.linear,
            prefers_packed=True,
            flat_attention=functools.partial(attention.paged_attention, cascade=False),
            masked_linear=linear_masked.row_masked_linear if deterministic else linear_masked.masked_linear,
            layer_linear=(linear.int8_row_linear if deterministic else linear.int8_linear) if int8 else None,
            sample_tokens=drawing.sample_tokens,
            layer_stack=functools.partial(layer_stack.LayerStack, by_row=deterministic, int8=int8),
            deterministic=deterministic,
        )
    if backend == "torch":
        if deterministic:
            raise KernelUnavailable(
                "the torch attention backend has no deterministic form; the cpu and triton backends have one."
            )
        return _torch_ops()
    if backend == "triton":
        return _triton_ops(deterministic)
    raise ValueError(f"there is no backend {backend!r}; choose 'cpu', 'torch' or 'triton'.")


def _torch_ops() -> Ops:
    from ramify.kernels.reference import activation, attention, kv_store, linear, logits, norm, rope, sampling

    return Ops(
        attention.paged_attention,
        kv_store.store_kv,
        kv_store.copy_pages,
        rope.rope_store_kv,
        norm.rms_norm,
        logits.apply_mask,
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


def _triton_ops(deterministic: bool) -> Ops:
    try:
        from ramify.kernels.triton.interpret import INTERPRETED
    except ImportError as error:
        raise KernelUnavailable(f"the Triton kernels cannot be loaded: {error}.") from error

    if not INTERPRETED and not torch.cuda.is_available():
        raise KernelUnavailable(
            "the Triton kernels need a CUDA device, and torch.cuda.is_available() is False. The cpu and "
            "torch attention backends need none; with TRITON_INTERPRET=1 Triton's interpreter runs them."
        )
    from ramify.kernels.triton import activation, attention, kv_store, logits, matmul, norm, planner, rope
    from ramify.kernels.triton import sampling as drawing

    return Ops(
        attention.paged_attention,
        kv_store.store_kv,
        kv_store.copy_pages,
        rope.rope_store_kv,
        norm.rms_norm,
        logits.apply_mask,
        add_rms_norm=norm.add_rms_norm,
        silu_mul=activation.silu_mul,
        gelu_mul=activation.gelu_mul,
        sampling=SamplingOps(
            logits.edit_logits,
            logits.restore_logits,
            drawing.sample_tokens,
            logits.log_probabilities,
        ),
        planner=planner.Planner,
        matmul=matmul.matmul if deterministic else None,
        deterministic=deterministic,
    )
