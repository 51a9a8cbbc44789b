"""Each kernel of the main path against its twin in torch, with outputs filled with NaN beforehand.

A case fails if the relative error is above `MOST_ERROR`, if the kernel does not write exactly the elements
that its twin writes, or if a token differs. The other cases go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_visit.device import device_of, free
from benchmarks.gpu_visit.figures import Figures
from ramify.kernels.reference import activation as twin_activation
from ramify.kernels.reference import float8 as twin_float8
from ramify.kernels.reference import kv_store as twin_kv_store
from ramify.kernels.reference import norm as twin_norm
from ramify.kernels.reference import quantised as twin_quantised
from ramify.kernels.reference import rope as twin_rope
from ramify.kernels.triton import activation, cascade, float8, kv_store, matmul, norm, quantised, rope
from ramify.kernels.triton.ahead import fix_cache_keys
from ramify.kernels.triton.attention import plan_attention, plan_shape, run_plan
from ramify.kernels.triton.plan.cascade_groups import Group
from ramify.runtime.executor.device import FLOAT8, capability_of
from tests.kernels import sampling_cases
from tests.kernels.kernel_cases.attention import Inputs, Lengths, Model
from tests.kernels.sampling_cases import Row

MOST_ERROR = 1e-2
"""Largest relative error, ‖out - twin‖ / ‖twin‖. With bfloat16 operands it lies between 1e-3 and 1e-2."""

Pair = tuple[Tensor, Tensor]
"""(output of a kernel, output of its twin)."""
Compare = Callable[[torch.device], list[Pair]]


class Wrong(Exception):
    """A kernel whose result is not that of its twin."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of an 8B Llama, by default, or of a rehearsal. Context lengths are divided by `shrink`."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    inner: int = 14336
    vocab: int = 128256
    tokens: int = 4096
    rows: int = 64
    shrink: int = 1
    forms: tuple[tuple[int, bool], ...] = ((64, False), (64, True), (16, False), (16, True))
    """(page size, whether attention is deterministic) for each form of attention."""
    dtype: torch.dtype = torch.bfloat16
    """The dtype of products."""

    def model(self, page_size: int) -> Model:
        return Model(self.heads, self.kv_heads, self.head_dim, page_size)

    def positions(self, thousands: int) -> int:
        return thousands * 1024 // self.shrink


TINY = Sizes(
    heads=2,
    kv_heads=1,
    head_dim=32,
    hidden=64,
    inner=96,
    vocab=300,
    tokens=6,
    rows=2,
    shrink=128,
    forms=((64, False), (16, True)),
    dtype=torch.float16,  # the interpreter multiplies the bits of bfloat16
)


@torch.inference_mode()
def run(figures: Figures) -> None:
    device, sizes = device_of(figures), TINY if figures.tiny else Sizes()
    fix_cache_keys()
    held_against_twins(figures, kernels(sizes, device), device)
    for case, check in draws(sizes, device):
        with figures.attempt(case):
            check()
            figures.add(case, equal=True)
        free(device)
    held_against_twins(figures, last(sizes), device)


def held_against_twins(figures: Figures, cases: Iterable[tuple[str, Compare]], device: torch.device) -> None:
    for case, compare in cases:
        with figures.attempt(case):
            error = max(relative_error(out, wanted) for out, wanted in compare(device))
            figures.add(case, error_rel=error)
            if not error < MOST_ERROR:
                raise Wrong(f"the relative error is {error:.3g}; at most {MOST_ERROR} is right")
        free(device)


def relative_error(out: Tensor, wanted: Tensor) -> float:
    """‖out - wanted‖ / ‖wanted‖ over the elements that the twin wrote. Raises `Wrong` unless the kernel wrote
    exactly these."""
    written = ~wanted.isnan()
    differing = int((out.isnan() == written).sum())
    if differing:
        missing = int((out.isnan() & written).sum())
        raise Wrong(
            f"of {written.numel()} elements {missing} were not written or are NaN, and {differing - missing} "
            "were written that nobody may write"
        )
    exact = wanted.double().nan_to_num(0.0)
    return float((out.double().nan_to_num(0.0) - exact).norm() / exact.norm().clamp(min=1e-30))


def kernels(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Compare]]:
    """(name, function that runs a kernel and its twin on the same random numbers) for each case."""
    k, many = sizes.positions, sizes.rows
    lengths = {
        "decode 1 x 4k": Lengths(1, (k(4),)),
        f"decode {many} x 4k": Lengths(1, tuple(k(4) - row for row in range(many))),
        "prefill 4k": Lengths(k(4) - 3, (k(4) - 3,)),
        "prefill 1k after 15k": Lengths(k(1), (k(16),)),
        f"cascade {many} over 8k": Lengths(1, tuple(k(8) + 40 + row for row in range(many)), k(8)),
    }
    for page_size, deterministic in sizes.forms:
        for case, shape in lengths.items():
            name = f"{case}, pages of {page_size}{', deterministic' if deterministic else ''}"
            yield name, partial(_attention, shape, sizes.model(page_size), deterministic)
    for page_size in (64, 16):
        yield f"rope + store, pages of {page_size}", partial(_rope, sizes, page_size)
        yield f"copy pages of {page_size}", partial(_copies, sizes, page_size)
    yield "norm", partial(_norm, sizes)
    yield "add + norm", partial(_add_norm, sizes)
    yield "silu * up", partial(_silu_mul, sizes)
    for rows in (1, sizes.rows, sizes.tokens):
        yield f"deterministic product, {rows} rows", partial(_product, sizes, rows)
    if (capability_of(device) or FLOAT8) >= FLOAT8:
        yield "float8 product", partial(_float8, sizes)


def last(sizes: Sizes) -> Iterator[tuple[str, Compare]]:
    """The last case. It comes last because, where nothing is compiled yet, it first compiles for the CPU, for
    8 s."""
    yield "W4A16 product", partial(_quantised, sizes)


def draws(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, check) for each case. The check raises if a token differs from the twin's for the same logits
    and uniforms."""
    rows: dict[str, list[Row]] = {
        "greedy": [Row(0.0)],
        "straight": [Row(), Row(0.7), Row(min_p=0.1)],
        "top-p": [Row(top_p=0.9), Row(0.7, top_p=0.5)],
        "top-k": [Row(top_k=50), Row(2.0, top_k=40, top_p=0.9)],
    }
    where, repeats = str(device), max(1, sizes.rows // 4)
    for name, options in rows.items():
        for masked in ("none", "some"):
            case = f"sample {name}{', with masks' if masked == 'some' else ''}"
            yield (
                case,
                partial(
                    sampling_cases.check_draws,
                    options, sizes.vocab, torch.bfloat16, where, masked=masked, repeats=repeats,
                ),
            )  # fmt: skip
    logits = sampling_cases.logits_of(sizes.rows, sizes.vocab, torch.bfloat16, where)
    yield "log-probabilities, top 20", partial(sampling_cases.check_logprobs, logits, 20)


def _random(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _poisoned(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def _attention(lengths: Lengths, model: Model, deterministic: bool, device: torch.device) -> list[Pair]:
    """Attention and its twin: torch in float64, one sequence at a time. In the pages, rows after a sequence's
    end are NaN."""
    inputs = Inputs(lengths, model, device)
    for row, length in enumerate(lengths.lens):
        last, used = divmod(length, model.page_size)
        if used:
            for pages in (inputs.k, inputs.v):
                pages[int(inputs.page_table[row, last]), :, used:] = torch.nan
    shape = plan_shape(inputs.q, inputs.k, window=0, deterministic=deterministic)
    if lengths.shared:
        groups = [Group(tuple(range(len(lengths.lens))), 0, lengths.shared)]
        plan = cascade.plan_cascade(inputs.starts, lengths.lens, groups, shape, device)
    else:
        plan = plan_attention(inputs.starts, lengths.lens, shape, device)
    inputs.out.fill_(torch.nan)
    run_plan(plan, inputs.q, inputs.k, inputs.v, inputs.table, inputs.out, scale=inputs.scale)
    return [(inputs.out, inputs.twin(torch.float64))]


def _rope(sizes: Sizes, page_size: int, device: torch.device) -> list[Pair]:
    heads, kv_heads, dim, tokens = sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.tokens
    count = -(-tokens // page_size) + 3
    qkv = _random(device, tokens, heads + 2 * kv_heads, dim)
    angle = 9 * torch.randn(tokens, dim // 2, device=device)
    rotation = torch.polar(torch.ones_like(angle), angle)
    slots = torch.randperm(count * page_size, device=device)[:tokens]
    found: list[list[Tensor]] = []
    for store in (rope.rope_store_kv, twin_rope.rope_store_kv):
        given = qkv.clone()
        q, k, v = given.split([heads, kv_heads, kv_heads], dim=1)
        pages = [_poisoned(device, count, kv_heads, page_size, dim) for _ in range(2)]
        store(q, k, v, rotation, *pages, slots)
        found.append([given, *pages])
    return list(zip(*found, strict=True))


def _copies(sizes: Sizes, page_size: int, device: torch.device) -> list[Pair]:
    shape = (3, 2 * sizes.rows, sizes.kv_heads, page_size, sizes.head_dim)
    source = list(range(sizes.rows))
    found = []
    pools = [_random(device, *shape) for _ in range(2)]
    for pool in pools:
        pool[:, sizes.rows :] = torch.nan
    for copy in (kv_store.copy_pages, twin_kv_store.copy_pages):
        given = [pool.clone() for pool in pools]
        copy(*given, source, [2 * sizes.rows - 1 - page for page in source])
        found.append(given)
    return list(zip(*found, strict=True))


def _norm(sizes: Sizes, device: torch.device) -> list[Pair]:
    x, weight = _random(device, sizes.tokens, sizes.hidden), _random(device, sizes.hidden)
    return _both(norm.rms_norm, twin_norm.rms_norm, (x, weight, 1e-5), x.shape)


def _add_norm(sizes: Sizes, device: torch.device) -> list[Pair]:
    x, residual = (_random(device, sizes.tokens, sizes.hidden) for _ in range(2))
    weight, other = _random(device, sizes.hidden), residual.clone()
    out = norm.add_rms_norm(x, residual, weight, 1e-5, out=_poisoned(device, *x.shape))
    wanted = twin_norm.add_rms_norm(x, other, weight, 1e-5)
    return [(out, wanted), (residual, other)]


def _silu_mul(sizes: Sizes, device: torch.device) -> list[Pair]:
    x = _random(device, sizes.tokens, 2 * sizes.inner)
    return _both(activation.silu_mul, twin_activation.silu_mul, (x,), (sizes.tokens, sizes.inner))


def _product(sizes: Sizes, rows: int, device: torch.device) -> list[Pair]:
    x, weight = (_random(device, count, sizes.hidden, dtype=sizes.dtype) for count in (rows, sizes.inner))
    out = matmul.matmul(x, weight, out=_poisoned(device, rows, sizes.inner, dtype=sizes.dtype))
    return [(out, x.float() @ weight.float().t())]


def _quantised(sizes: Sizes, device: torch.device) -> list[Pair]:
    from tests.kernels import quantised_cases

    weight = quantised_cases.weight_of("int4", 128, sizes.hidden, sizes.hidden, str(device))
    x = _random(device, sizes.rows, sizes.hidden, dtype=sizes.dtype)
    return _both(quantised.quantised_matmul, twin_quantised.quantised_matmul, (x, weight), x.shape)


def _float8(sizes: Sizes, device: torch.device) -> list[Pair]:
    from tests.kernels import float8_cases

    weight = float8_cases.weight_of(sizes.hidden, sizes.hidden, 0, str(device))
    x = _random(device, sizes.rows, sizes.hidden, dtype=sizes.dtype)
    return _both(float8.float8_matmul, twin_float8.float8_matmul, (x, weight), x.shape)


def _both(
    kernel: Callable[..., Tensor],
    twin: Callable[..., Tensor],
    given: tuple[object, ...],
    shape: tuple[int, ...],
) -> list[Pair]:
    """The outputs of `kernel` and `twin` for the same arguments, each followed by columns of NaN that must
    not be written."""
    x = given[0]
    assert isinstance(x, Tensor)
    wide = [_poisoned(x.device, *shape[:-1], shape[-1] + 8, dtype=x.dtype) for _ in range(2)]
    for function, out in zip((kernel, twin), wide, strict=True):
        function(*given, out=out[..., : shape[-1]])
    return [(wide[0], wide[1])]
