"""Argument checks that all backends share, so that a kernel and its reference refuse the same arguments.

A `check_*` function raises `ValueError` naming the argument that does not fit. Functions with an `out`
parameter return it, or newly allocated memory. A decode step runs these checks once a layer, so a valid
argument costs about one comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ramify.kernels.arguments.pages import head_dim_of
from ramify.kernels.weights.packed import PackedWeight
from ramify.kernels.weights.quantised import QuantisedWeight
from ramify.kernels.weights.stack import ExpertMatrices, PackedExperts

DTYPES = (torch.float32, torch.bfloat16)
ALL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = torch.float8_e4m3fn
"""The dtype of float8 pages. They may be used with any dtype of q; the cpu backend does not support them."""


def check_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    window: int,
    soft_cap: float,
    out: Tensor | None,
    sinks: Tensor | None = None,
    *,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    page_dtypes: tuple[torch.dtype, ...] = (),
) -> Tensor:
    """Check the arguments of `paged_attention`. Pages have the dtype of q or one of `page_dtypes`."""
    shape, dtype = q.shape, q.dtype
    if len(shape) != 3:
        raise ValueError(f"q is {tuple(shape)}; it must be (T, heads, head_dim).")
    _check_pages(k_pages, v_pages, dtype, dtypes, page_dtypes)
    _, heads, dim = shape
    kv_heads = k_pages.shape[1]
    if head_dim_of(k_pages) != dim or heads % kv_heads:
        raise ValueError(
            f"k_pages {tuple(k_pages.shape)} do not fit q {tuple(shape)}: head_dim must be equal and heads a "
            "multiple of kv_heads."
        )
    if q.stride()[1:] != (dim, 1):
        raise ValueError("the heads of each token of q must be contiguous.")
    for name, indices in (("page_table", page_table), ("query_starts", query_starts), ("kv_lens", kv_lens)):
        if indices.dtype != torch.int32 or not indices.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32.")
    (sequences, _), (starts,), (lens,) = page_table.shape, query_starts.shape, kv_lens.shape
    if starts != sequences + 1 or lens != sequences:
        raise ValueError(
            f"{sequences} rows of page_table need {sequences + 1} query_starts (not {starts}) and "
            f"{sequences} kv_lens (not {lens})."
        )
    if window < 0 or soft_cap < 0.0:
        raise ValueError(f"window is {window} and soft_cap {soft_cap}; both must be 0 (off) or more.")
    if sinks is not None and (
        sinks.shape != (heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous()
    ):
        raise ValueError(f"sinks is {tuple(sinks.shape)} {sinks.dtype}; it must be ({heads},) float32.")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=q.device)
    if out.shape != shape or out.dtype != dtype or out.stride()[1:] != (dim, 1):
        raise ValueError(f"out must be {tuple(shape)} {dtype} with contiguous tokens.")
    return out


def check_lengths(
    query_starts: Tensor, kv_lens: Tensor, tokens: int, capacity: int
) -> tuple[list[int], list[int]]:
    """`query_starts` and `kv_lens` as lists. Raises ValueError naming the first sequence with wrong
    lengths."""
    starts, lens = query_starts.tolist(), kv_lens.tolist()
    for row, length in enumerate(lens):
        new = starts[row + 1] - starts[row]
        if starts[row] < 0 or not 0 <= new <= length <= capacity or starts[row + 1] > tokens:
            raise wrong_lengths(row, tokens, capacity)
    return starts, lens


def wrong_lengths(row: int, tokens: int, capacity: int) -> ValueError:
    return ValueError(
        f"sequence {row}: query_starts must ascend within the {tokens} tokens of q, and kv_lens must count "
        f"the new tokens and fit the {capacity} positions of a row of page_table."
    )


def check_store(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    page_dtypes: tuple[torch.dtype, ...] = (),
) -> None:
    """Check the arguments of a store of keys and values. Pages have the dtype of k or one of
    `page_dtypes`."""
    _check_pages(k_pages, v_pages, k.dtype, dtypes, page_dtypes)
    kv_heads, dim = k_pages.shape[1], head_dim_of(k_pages)
    shape = (len(slots), kv_heads, dim)
    if k.shape != shape or v.shape != shape or v.dtype != k.dtype:
        raise ValueError(f"k is {tuple(k.shape)} and v {tuple(v.shape)}; both must be {shape} in one dtype.")
    if k.stride()[1:] != (dim, 1) or v.stride()[1:] != (dim, 1):
        raise ValueError("the heads of each token of k and v must be contiguous.")
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise ValueError("slots must be contiguous int64 of one dimension.")


def check_copy(k_pages: Tensor, v_pages: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
    if k_pages.shape != v_pages.shape or k_pages.dim() not in (4, 5):
        raise ValueError(
            f"k_pages {tuple(k_pages.shape)} and v_pages {tuple(v_pages.shape)} must be equal, with 4 axes "
            "or with a leading axis of layers."
        )
    num_pages = k_pages.shape[-4]
    if len(src) != len(dst):
        raise ValueError(f"{len(src)} sources for {len(dst)} destinations.")
    if len({*src, *dst}) < len({*src}) + len(dst):
        raise ValueError("a page must not be copied to twice, nor be both a source and a destination.")
    if src and not (min(*src, *dst) >= 0 and max(*src, *dst) < num_pages):
        raise ValueError(f"src {list(src)} and dst {list(dst)} must lie within the {num_pages} pages.")


def _check_pages(
    k_pages: Tensor,
    v_pages: Tensor,
    dtype: torch.dtype,
    dtypes: tuple[torch.dtype, ...],
    page_dtypes: tuple[torch.dtype, ...],
) -> None:
    kept = k_pages.dtype if k_pages.dtype in page_dtypes else dtype
    if dtype not in dtypes or k_pages.dtype != kept or v_pages.dtype != kept:
        raise ValueError(
            f"new tokens are {dtype} and the pages {k_pages.dtype} and {v_pages.dtype}; all must be one of "
            f"{_names(dtypes)}."
        )
    stride = k_pages.stride()
    if k_pages.shape != v_pages.shape or stride != v_pages.stride() or len(stride) != 4 or stride[3] != 1:
        raise ValueError(
            f"k_pages {tuple(k_pages.shape)} and v_pages {tuple(v_pages.shape)} must be (num_pages, "
            "kv_heads, page_size, head_dim), alike in shape and strides, with contiguous rows."
        )


def check_norm(
    x: Tensor, weight: Tensor, out: Tensor | None, *, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> Tensor:
    shape, dtype = x.shape, x.dtype
    if len(shape) not in (2, 3) or dtype not in dtypes or x.stride(-1) != 1:
        raise ValueError(
            f"x is {tuple(shape)} {dtype}; it must be (T, size) or (T, heads, size), {_names(dtypes)}, "
            "contiguous in the last axis."
        )
    if weight.shape != shape[-1:] or weight.dtype not in (dtype, torch.float32) or weight.stride(0) != 1:
        raise ValueError(f"weight is {tuple(weight.shape)} {weight.dtype}; x is {tuple(shape)} {dtype}.")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=x.device)
    if out.shape != shape or out.dtype != dtype or out.stride(-1) != 1:
        raise ValueError(f"out must be {tuple(shape)} {dtype}, contiguous in the last axis.")
    return out


def check_rope(q: Tensor, k: Tensor, rotation: Tensor) -> None:
    """Check q, rotation, and k's shape and dtype; for k's strides, v and the pages see `check_store`."""
    if q.dim() != 3 or q.dtype != k.dtype or k.shape[::2] != q.shape[::2]:
        raise ValueError(
            f"q is {tuple(q.shape)} {q.dtype} and k {tuple(k.shape)} {k.dtype}; they must be (T, heads, "
            "head_dim) and (T, kv_heads, head_dim) in one dtype."
        )
    tokens, _, dim = q.shape
    if q.stride()[1:] != (dim, 1):
        raise ValueError("the heads of each token of q must be contiguous.")
    if dim % 2 or rotation.shape != (tokens, dim // 2):
        raise ValueError(f"rotation is {tuple(rotation.shape)}; q {tuple(q.shape)} needs (T, head_dim / 2).")
    if rotation.dtype != torch.complex64 or not rotation.is_contiguous():
        raise ValueError("rotation must be contiguous complex64.")


def check_linear(
    x: Tensor, weight: PackedWeight, norm: tuple[Tensor, float] | None, out: Tensor | None, add: bool
) -> Tensor:
    if x.dim() != 2 or x.shape[1] != weight.inputs or x.dtype not in DTYPES or x.stride(1) != 1:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}; it must be (T, {weight.inputs}) float32 or bfloat16 with "
            "contiguous rows."
        )
    if norm is not None and (norm[0].shape != (weight.inputs,) or norm[0].dtype != x.dtype):
        raise ValueError(f"norm's weight must be ({weight.inputs},) {x.dtype}.")
    return _checked_out(out, (x.shape[0], weight.results), x, DTYPES, add=add)


def check_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, add: bool) -> Tensor:
    if x.dim() != 2 or x.dtype not in ALL_DTYPES or x.stride(1) != 1:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}; it must be (T, inputs), {_names(ALL_DTYPES)}, with contiguous "
            "rows."
        )
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.dtype != x.dtype or weight.stride(1) != 1:
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}; x {tuple(x.shape)} needs (outputs, "
            f"{x.shape[1]}) {x.dtype} with contiguous rows."
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype or bias.stride(0) != 1):
        raise ValueError(f"bias must be contiguous ({len(weight)},) {x.dtype}.")
    return _checked_out(out, (len(x), len(weight)), x, (x.dtype,), add=add)


def check_quantised(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None, out: Tensor | None, add: bool
) -> Tensor:
    if x.dim() != 2 or x.shape[1] != weight.inputs or x.dtype not in ALL_DTYPES or x.stride(1) != 1:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}; it must be (T, {weight.inputs}), {_names(ALL_DTYPES)}, with "
            "contiguous rows."
        )
    if bias is not None and (bias.shape != (weight.outputs,) or bias.dtype != x.dtype or bias.stride(0) != 1):
        raise ValueError(f"bias must be contiguous ({weight.outputs},) {x.dtype}.")
    return _checked_out(out, (len(x), weight.outputs), x, (x.dtype,), add=add)


def check_float8(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None, out: Tensor | None, add: bool
) -> Tensor:
    if weight.form != "fp8" or weight.block % 32 or weight.order is not None:
        raise ValueError(
            f"weight is {weight.form} in blocks of {weight.block}; it must be fp8 in 32 or more."
        )
    return check_quantised(x, weight, bias, out, add)


def check_add_norm(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    if x.dim() != 2 or residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(1) != 1:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype} and residual {tuple(residual.shape)} {residual.dtype}; both "
            "must be (T, size) in one dtype with contiguous rows."
        )
    return check_norm(x, weight, out, dtypes=ALL_DTYPES)


def check_gated(x: Tensor, out: Tensor | None) -> Tensor:
    if x.dim() != 2 or x.shape[1] % 2 or x.dtype not in ALL_DTYPES or x.stride(1) != 1:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}; it must be (T, 2 size), {_names(ALL_DTYPES)}, with contiguous "
            "rows."
        )
    return _checked_out(out, (x.shape[0], x.shape[1] // 2), x, (x.dtype,))


def check_head_norms(q: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
    """Check q_norm and k_norm against q, which `check_rope` must have accepted."""
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is None:
            continue
        if (
            weight.shape != q.shape[-1:]
            or weight.dtype not in (q.dtype, torch.float32)
            or weight.stride(0) != 1
        ):
            raise ValueError(
                f"{name} is {tuple(weight.shape)} {weight.dtype}; q is {tuple(q.shape)} {q.dtype}."
            )


def check_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertMatrices, out: Tensor | None, add: bool
) -> Tensor:
    count, double, hidden = experts.gate_up.shape
    if x.dim() != 2 or x.shape[1] != hidden or x.dtype not in ALL_DTYPES or x.stride(1) != 1:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}; it must be (T, {hidden}), {_names(ALL_DTYPES)}, with "
            "contiguous rows."
        )
    matrices = {"gate_up": (count, double, hidden), "down": (count, hidden, double // 2)}
    for name, shape in (*matrices.items(), ("gate_up_bias", (count, double)), ("down_bias", (count, hidden))):
        matrix = getattr(experts, name)
        if matrix is None:
            continue
        if matrix.shape != shape or matrix.dtype != x.dtype or not matrix.is_contiguous():
            raise ValueError(f"{name} is {tuple(matrix.shape)}; it must be contiguous {shape} {x.dtype}.")
    if chosen.dim() != 2 or len(chosen) != len(x) or chosen.dtype != torch.int32:
        raise ValueError(
            f"chosen is {tuple(chosen.shape)} {chosen.dtype}; it must be ({len(x)}, top_k) int32."
        )
    if weights.shape != chosen.shape or weights.dtype != torch.float32:
        raise ValueError(f"weights must be {tuple(chosen.shape)} float32.")
    if not chosen.is_contiguous() or not weights.is_contiguous():
        raise ValueError("chosen and weights must be contiguous.")
    return _checked_out(out, (len(x), hidden), x, (x.dtype,), add=add)


def check_packed_experts(
    x: Tensor, experts: PackedExperts, norm: tuple[Tensor, float] | None, out: Tensor | None, add: bool
) -> Tensor:
    check_linear(x, experts.router, norm, None, add=False)
    out = _checked_out(out, (len(x), experts.router.inputs), x, (x.dtype,), add=add)
    if out.data_ptr() == x.data_ptr() and not add:
        raise ValueError("out overlaps x; without add it must not.")
    return out


def _checked_out(
    out: Tensor | None,
    shape: tuple[int, int],
    x: Tensor,
    dtypes: tuple[torch.dtype, ...],
    *,
    add: bool = False,
) -> Tensor:
    if out is None:
        if add:
            raise ValueError("add is set, but there is no out to add to.")
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.shape != shape or out.dtype not in dtypes or out.stride(1) != 1:
        raise ValueError(f"out must be {shape}, {_names(dtypes)}, with contiguous rows.")
    return out


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(each).removeprefix("torch.") for each in dtypes)
