"""The passes over the logits: maxima and masses of chunks, then the candidates for the most likely tokens.

`scan` reads every logit once and writes the maximum of each group of 32 tokens. `threshold` takes the K-th
largest of these maxima: at least K tokens reach it, and seldom many more. `collect` reads only the groups
that reach the threshold, and lists their candidates. Nothing here depends on the number of rows.

Example with groups of 2 and K = 2:

    logits       (5 1) (4 4) (0 2) (3 3)
    maxima        5     4     2     3
    threshold    4, the second largest maximum
    candidates   5 4 4, from the first two groups; the others are not read again
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.triton.tiles.launch import padded
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
"""Most candidates of a row: as many as a sort in registers takes."""
_CHUNKS, _GROUPS = 128, 2048
"""The least sizes of the blocks that hold a row's chunks and a row's groups. Vocabularies of up to 524288 and
65536 tokens share these sizes, so that kernels are not compiled for each vocabulary."""
RANK = 512
"""The K of the threshold. Top-p of ordinary text needs a few hundred candidates; ties can add more."""


@triton.jit(do_not_specialize=["rows", "mask_stride", "chunks"])
def scan(  # type: ignore[no-untyped-def]
    logits_ptr, mask_ptr, mask_row_ptr, options_ptr, top_ptr, id_ptr, mass_ptr, group_ptr,
    rows, logits_stride, mask_stride, vocab, chunks,
    HAS_MASK: tl.constexpr, DRAWN: tl.constexpr, GROUPED: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """Program i: chunk i % chunks of row i // chunks.

    HAS_MASK : use mask_ptr and mask_row_ptr
    DRAWN : use options_ptr; else the temperature is 1
    GROUPED : write the maxima of groups
    """
    program = tl.program_id(0)
    row, chunk = program // chunks, program % chunks
    mask_row = 0
    if HAS_MASK:
        mask_row = tl.load(mask_row_ptr + row)
    temperature = 1.0
    if DRAWN:
        temperature = tl.load(options_ptr + row).to(tl.float32)
    divisor = tl.where(temperature > 0.0, temperature, 1.0)
    first = chunk * (SUBS * 32)
    whole = tl.full([SUBS], 1, tl.int1)
    x = load_block(
        logits_ptr + row.to(tl.int64) * logits_stride, mask_ptr + tl.cast(mask_row, tl.int64) * mask_stride,
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
    """Program r: the least `order` of row r's candidates; LOWEST if all tokens above -inf are candidates.

    The threshold is the K-th largest maximum of the groups, found bit by bit. K is `rank`, or the row's top-k
    if that is smaller, but at most 5/8 of the groups with a token above -inf. With 5/8, about as many tokens
    reach the threshold as there are groups.
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


@triton.jit(do_not_specialize=["rows", "mask_stride", "chunks"])
def collect(  # type: ignore[no-untyped-def]
    logits_ptr, mask_ptr, mask_row_ptr, options_ptr, top_ptr, group_ptr, threshold_ptr, count_ptr, found_ptr,
    rows, logits_stride, mask_stride, vocab, chunks,
    HAS_MASK: tl.constexpr, DRAWN: tl.constexpr, CANDIDATES: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """Append the `packed` candidates of a chunk to its row's list, in any order of chunks.

    Candidates beyond the list's CANDIDATES entries are counted but not kept.
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
        mask_row = 0
        if HAS_MASK:
            mask_row = tl.load(mask_row_ptr + row)
        first = chunk * (SUBS * 32)
        wanted = order(tl.load(group_ptr + program.to(tl.int64) * SUBS + tl.arange(0, SUBS))) >= limit
        x = load_block(
            logits_ptr + row.to(tl.int64) * logits_stride,
            mask_ptr + tl.cast(mask_row, tl.int64) * mask_stride,
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
    """The results of the passes over R rows: maxima, first ids and masses of chunks; thresholds, counts and
    candidates of rows."""

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
        """The number of chunks, padded to a power of two that is the same for most vocabularies."""
        return padded(max(self.chunks, _CHUNKS))


def scanned(
    logits: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    mask_rows: Tensor | None,
    *,
    rank: int,
) -> Scanned:
    """Run the passes.

    values : of `SamplingOptions`; None for candidates of all rows at temperature 1
    mask_rows : must be given if `mask` is given
    rank : the K of the threshold; 0 for no candidates
    """
    rows, vocab = logits.shape
    subs = CHUNK // GROUP
    chunks = triton.cdiv(vocab, subs * GROUP)
    cells = rows * chunks

    def empty(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=logits.device)

    grouped = rank > 0
    tops, ids = empty(cells, torch.float32), empty(cells, torch.int32)
    masses, groups = empty(cells, torch.float64), empty(cells * subs if grouped else 0, torch.float32)
    options = logits if values is None else values
    masks = logits if mask is None else mask
    places = tops if mask_rows is None else mask_rows
    strides = logits.stride(0), masks.stride(0)
    flags = {"HAS_MASK": mask is not None, "DRAWN": values is not None, "SUBS": subs}
    settings = {"num_warps": subs // 16, "enable_fp_fusion": False}
    scan[(cells,)](
        logits, masks, places, options, tops, ids, masses, groups, rows, *strides, vocab, chunks,
        GROUPED=grouped, **flags, **settings,
    )  # fmt: skip
    room = rows if grouped else 0
    thresholds, counts = empty(room, torch.int64), empty(room, torch.int32)
    found = empty(room * CANDIDATES, torch.int64)
    if grouped:
        block = padded(max(chunks * subs, _GROUPS))
        threshold[(rows,)](
            options, groups, thresholds, counts, rows, chunks * subs, rank,
            DRAWN=values is not None, CANDIDATES=CANDIDATES, BLOCK=block,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        collect[(cells,)](
            logits, masks, places, options, tops, groups, thresholds, counts, found, rows, *strides, vocab,
            chunks, CANDIDATES=CANDIDATES, **flags, **settings,
        )  # fmt: skip
    return Scanned(subs, chunks, tops, ids, masses, thresholds, counts, found)
