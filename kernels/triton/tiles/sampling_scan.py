"""The passes over the logits: maxima and masses of chunks, then the tokens that can be among the first.

`scan` reads every logit once. The maxima of groups of 32 that it leaves give a threshold which at least so
many tokens reach as there are maxima above it, and seldom many more; `collect` reads only the groups that
reach it. Nothing here depends on the number of rows.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.triton.launch import padded
from ramify.kernels.triton.tiles.sampling_tile import (
    CHUNK,
    GROUP,
    LOWEST,
    SMALLEST,
    block_tokens,
    exp,
    load_block,
    order,
    packed,
)

LOG = 10
CANDIDATES = 2**LOG
"""Room for candidates of a row: what a sort in registers takes."""
RANK = 512
"""Candidates aimed at. Top-p of ordinary text needs a few hundred; ties and runs may give more than RANK."""


@triton.jit(do_not_specialize=["rows"])
def scan(  # type: ignore[no-untyped-def]
    logits_ptr, mask_ptr, mask_row_ptr, options_ptr, top_ptr, id_ptr, mass_ptr, group_ptr,
    rows, logits_stride, mask_stride, vocab, chunks,
    HAS_MASK: tl.constexpr, LISTED: tl.constexpr, DRAWN: tl.constexpr, GROUPED: tl.constexpr,
    SUBS: tl.constexpr,
):  # fmt: skip
    """Program i: chunk i % chunks of row i // chunks.

    LISTED : mask_row_ptr is there
    DRAWN : options_ptr is there; else the temperature is 1 for all
    GROUPED : the maxima of groups are wanted
    """
    program = tl.program_id(0)
    row, chunk = program // chunks, program % chunks
    mask_row = row
    if LISTED:
        mask_row = tl.load(mask_row_ptr + row)
    temperature = 1.0
    if DRAWN:
        temperature = tl.load(options_ptr + row).to(tl.float32)
    divisor = tl.where(temperature > 0.0, temperature, 1.0)
    first = chunk * (SUBS * 32)
    whole = tl.full([SUBS], 1, tl.int1)
    x = load_block(
        logits_ptr + row.to(tl.int64) * logits_stride, mask_ptr + mask_row.to(tl.int64) * mask_stride,
        mask_row >= 0, first, vocab, divisor, whole, HAS_MASK, SUBS,
    )  # fmt: skip
    group_top = tl.max(x, axis=1)
    top = tl.max(group_top, axis=0)
    token = block_tokens(first, SUBS)
    tl.store(top_ptr + program, top)
    tl.store(id_ptr + program, tl.min(tl.min(tl.where(x == top, token, vocab), axis=1), axis=0))
    if GROUPED:
        tl.store(group_ptr + program.to(tl.int64) * SUBS + tl.arange(0, SUBS), group_top)
    if temperature > 0.0:
        weight = exp(x - tl.maximum(top, SMALLEST)).to(tl.float64)
        tl.store(mass_ptr + program, tl.sum(tl.sum(weight, axis=1), axis=0))


@triton.jit(do_not_specialize=["rows", "rank"])
def threshold(  # type: ignore[no-untyped-def]
    options_ptr, group_ptr, threshold_ptr, count_ptr, rows, groups, rank,
    DRAWN: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The order that a row's candidates reach; LOWEST where all tokens above -inf are candidates.

    The K-th largest of the maxima of groups, found bit by bit, K being `rank` or the row's top-k. Where few
    groups have a token at all, K tokens of them would be nearly all of these: K is 5/8 of the groups then,
    which about as many tokens reach as there are groups.
    """
    row = tl.program_id(0)
    tl.store(count_ptr + row, 0)
    if DRAWN:
        top_k = tl.load(options_ptr + rows + row).to(tl.int32)
        rank = tl.where((top_k > 0) & (top_k < rank), top_k, rank)
    index = tl.arange(0, BLOCK)
    x = tl.load(group_ptr + row.to(tl.int64) * groups + index, mask=index < groups, other=float("-inf"))
    in_bounds = x > float("-inf")
    keys = order(x)
    alive = tl.sum(in_bounds.to(tl.int32), axis=0)
    rank = tl.minimum(rank, alive * 5 // 8)
    key = tl.full([], LOWEST, tl.int64)
    if alive * 32 > CANDIDATES:
        step = tl.full([], 2147483648, tl.int64)
        for _ in range(32):
            reached = tl.sum((in_bounds & (keys >= key + step)).to(tl.int32), axis=0)
            key = tl.where(reached >= rank, key + step, key)
            step = step // 2
    tl.store(threshold_ptr + row, key)


@triton.jit(do_not_specialize=["rows"])
def collect(  # type: ignore[no-untyped-def]
    logits_ptr, mask_ptr, mask_row_ptr, options_ptr, top_ptr, group_ptr, threshold_ptr, count_ptr, found_ptr,
    rows, logits_stride, mask_stride, vocab, chunks,
    HAS_MASK: tl.constexpr, LISTED: tl.constexpr, DRAWN: tl.constexpr, CANDIDATES: tl.constexpr,
    SUBS: tl.constexpr,
):  # fmt: skip
    """Append the candidates of a chunk to its row's, `packed`.

    The chunks of a row come in any order, which sorting undoes. More than fit are counted and not kept.
    """
    program = tl.program_id(0)
    row, chunk = program // chunks, program % chunks
    temperature, ordered = 1.0, True
    if DRAWN:
        temperature = tl.load(options_ptr + row).to(tl.float32)
        top_k = tl.load(options_ptr + rows + row)
        top_p = tl.load(options_ptr + 2 * rows + row).to(tl.float32)
        ordered = (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0))
    limit = tl.load(threshold_ptr + row)
    top = tl.load(top_ptr + program)
    if ordered & (order(top) >= limit) & (top > float("-inf")):
        mask_row = row
        if LISTED:
            mask_row = tl.load(mask_row_ptr + row)
        first = chunk * (SUBS * 32)
        wanted = order(tl.load(group_ptr + program.to(tl.int64) * SUBS + tl.arange(0, SUBS))) >= limit
        x = load_block(
            logits_ptr + row.to(tl.int64) * logits_stride, mask_ptr + mask_row.to(tl.int64) * mask_stride,
            mask_row >= 0, first, vocab, temperature, wanted, HAS_MASK, SUBS,
        )  # fmt: skip
        chosen = tl.reshape((order(x) >= limit) & (x > float("-inf")), [SUBS * 32])
        entry = tl.reshape(packed(x, block_tokens(first, SUBS)), [SUBS * 32])
        number = chosen.to(tl.int32)
        place = tl.atomic_add(count_ptr + row, tl.sum(number, axis=0)) + tl.cumsum(number, 0) - 1
        at = found_ptr + row.to(tl.int64) * CANDIDATES + place
        tl.store(at, entry, mask=chosen & (place < CANDIDATES))


@dataclasses.dataclass(frozen=True, slots=True)
class Scanned:
    """What the passes leave of R rows: per chunk, and of the candidates."""

    subs: int
    chunks: int
    tops: Tensor
    ids: Tensor
    masses: Tensor
    thresholds: Tensor
    counts: Tensor
    found: Tensor

    @property
    def block(self) -> int:
        """Chunks, padded."""
        return padded(self.chunks)


def scanned(
    logits: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    mask_rows: Tensor | None,
    *,
    rank: int,
) -> Scanned:
    """Run the passes. Without `values` (see `SamplingOptions`) rows are candidates at temperature 1.

    rank : candidates aimed at; 0 wants none
    """
    rows, vocab = logits.shape
    subs = min(CHUNK, max(GROUP, padded(vocab))) // GROUP
    chunks = triton.cdiv(vocab, subs * GROUP)
    cells = rows * chunks

    def empty(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=logits.device)

    grouped = rank > 0
    tops, ids = empty(cells, torch.float32), empty(cells, torch.int32)
    masses, groups = empty(cells, torch.float64), empty(cells * subs if grouped else 0, torch.float32)
    options = logits if values is None else values
    masks = logits if mask is None else mask
    listed = mask is not None and mask_rows is not None
    places = mask_rows if mask_rows is not None else tops
    strides = logits.stride(0), masks.stride(0)
    flags = {"HAS_MASK": mask is not None, "LISTED": listed, "DRAWN": values is not None, "SUBS": subs}
    settings = {"num_warps": max(1, subs // 16), "enable_fp_fusion": False}
    scan[(cells,)](
        logits, masks, places, options, tops, ids, masses, groups, rows, *strides, vocab, chunks,
        GROUPED=grouped, **flags, **settings,
    )  # fmt: skip
    room = rows if grouped else 0
    thresholds, counts = empty(room, torch.int64), empty(room, torch.int32)
    found = empty(room * CANDIDATES, torch.int64)
    if grouped:
        block = padded(chunks * subs)
        threshold[(rows,)](
            options, groups, thresholds, counts, rows, chunks * subs, rank,
            DRAWN=values is not None, CANDIDATES=CANDIDATES, BLOCK=block,
            num_warps=max(1, min(8, block // 256)), enable_fp_fusion=False,
        )  # fmt: skip
        collect[(cells,)](
            logits, masks, places, options, tops, groups, thresholds, counts, found, rows, *strides, vocab,
            chunks, CANDIDATES=CANDIDATES, **flags, **settings,
        )  # fmt: skip
    return Scanned(subs, chunks, tops, ids, masses, thresholds, counts, found)
