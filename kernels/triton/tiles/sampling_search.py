"""Sampling with top-k or top-p when the candidates are not enough: bounds found by a search over the row.

Needed for flat distributions, a top-k above the number of candidates, and logits with more ties than
candidates. A bound is an `order`, found digit by digit. Each pass over the row tests the nine digits of one
place:

    tokens of order 530, 528 and 190, each of weight 1; the bound of an amount of 2 is 528
    pass 1    100 200 … 500 600 …    amounts 3 2 2 2 2 0 …    two tokens reach 500
    pass 2    510 520 530 540 …      amounts 2 2 1 0 …        two tokens reach 520
    pass 3    521 … 528 529          amounts 2 … 2 1          two tokens reach 528; above is an amount of 1

Top-p takes 21 passes: one for the whole mass, ten for the bound of top-p and ten for the token. A pass reads
the chunks that reach its lowest order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramify.kernels.triton.tiles.sampling_tile import (
    LOWEST,
    below,
    block_tokens,
    exp,
    load_block,
    number_of,
    order,
)

BASE = tl.constexpr(10)
"""The base of the digits. A larger base takes fewer passes, but each pass makes BASE - 1 float64 additions
for each token, for which many GPUs have few units. Not measured: see docs/kernels.md."""
PASSES = tl.constexpr(10)
"""Digits of an order: BASE**PASSES is above 2**32."""


@triton.jit
def _in_thread(x, SUBS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of a (SUBS, 32) block over its two halves and over every four neighbours: numbers of one
    thread."""
    return tl.sum(tl.sum(tl.reshape(x, [2, SUBS // 2, 8, 4]), axis=3), axis=0)


@triton.jit
def _amounts(  # type: ignore[no-untyped-def]
    key, step, counting, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
    KEYS: tl.constexpr, HAS_MASK: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """One pass: for each order `key + i * step`, i < KEYS, the float64 mass of the tokens of that order or
    above; if `counting`, the number of these tokens above -inf. Returns a tuple of KEYS scalars.

    All amounts are summed in the same tree of additions, so that a larger order never has a larger amount.
    """
    amounts = ()
    for _ in tl.static_range(KEYS):
        amounts = amounts + (tl.zeros([SUBS // 2, 8], tl.float64),)  # type: ignore[assignment]  # noqa: RUF005
    whole = tl.full([SUBS], 1, tl.int1)
    for chunk in range(chunks):
        if order(tl.load(tops_row + chunk)) >= key:
            x = load_block(
                logits_row, mask_row, masked, chunk * (SUBS * 32), vocab, temperature, whole, HAS_MASK, SUBS
            )
            each = tl.where(x > float("-inf"), 1.0, 0.0)
            if not counting:
                each = exp(x - top)
            weight = each.to(tl.float64)
            keys = order(x).to(tl.int32)  # compared in half the instructions
            more = ()
            for i in tl.static_range(KEYS):
                limit = tl.minimum(key + i * step, 2147483647).to(tl.int32)
                reached = tl.where(keys >= limit, weight, 0.0)
                amount = amounts[i] + _in_thread(reached, SUBS)
                more = more + (amount,)  # type: ignore[assignment]  # noqa: RUF005 - no stars in Triton
            amounts = more
    sums = ()
    for i in tl.static_range(KEYS):
        total = tl.sum(tl.sum(amounts[i], axis=1), axis=0)
        sums = sums + (total,)  # type: ignore[assignment]  # noqa: RUF005
    return sums


@triton.jit
def _amount(  # type: ignore[no-untyped-def]
    key, counting, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
    HAS_MASK: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """As `_amounts`, of one order."""
    amounts = _amounts(
        key, 0, counting, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
        1, HAS_MASK, SUBS,
    )  # fmt: skip
    return amounts[0]


@triton.jit
def _bound(  # type: ignore[no-untyped-def]
    target, strict, counting, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
    HAS_MASK: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """The highest order for which the amount of the tokens of that order or above reaches (if `strict`,
    exceeds) the target.

    Returns that order, the amount of the tokens above it, and the weight of a token of that order.
    """
    key = tl.full([], LOWEST, tl.int64)
    step = tl.full([], BASE ** (PASSES - 1), tl.int64)
    above = tl.full([], 0.0, tl.float64)
    for _ in range(PASSES):
        amounts = _amounts(
            key + step, step, counting, logits_row, mask_row, masked, tops_row, top, temperature, vocab,
            chunks, BASE - 1, HAS_MASK, SUBS,
        )  # fmt: skip
        for i in tl.static_range(BASE - 1):
            enough = (amounts[i] > target) | ((amounts[i] == target) & (not strict))
            key = tl.where(enough, key + step, key)
            above = tl.where(enough, above, tl.maximum(above, amounts[i]))
        step = step // BASE
    return key, above, exp(number_of(key) - top).to(tl.float64)


@triton.jit
def _nth(  # type: ignore[no-untyped-def]
    key, nth, logits_row, mask_row, masked, tops_row, temperature, vocab, chunks,
    HAS_MASK: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """The token number `nth`, counted from 0, among the tokens of order `key`; the last one if there are
    fewer."""
    token = tl.full([], 0, tl.int32)
    seen = tl.full([], 0, tl.int32)
    whole = tl.full([SUBS], 1, tl.int1)
    for chunk in range(chunks):
        if (seen <= nth) & (order(tl.load(tops_row + chunk)) >= key):
            first = chunk * (SUBS * 32)
            x = load_block(logits_row, mask_row, masked, first, vocab, temperature, whole, HAS_MASK, SUBS)
            equal = tl.reshape((order(x) == key).to(tl.int32), [SUBS * 32])
            place = seen + tl.cumsum(equal, 0) - 1
            tokens = tl.reshape(block_tokens(first, SUBS), [SUBS * 32])
            token = tl.maximum(token, tl.max(tl.where((equal == 1) & (place <= nth), tokens, 0), 0))
            seen += tl.sum(equal, axis=0)
    return token


@triton.jit
def search(  # type: ignore[no-untyped-def]
    logits_row, mask_row, masked, tops_row, top, temperature, top_k, top_p, min_p, uniform, vocab, chunks,
    HAS_MASK: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """Sample the token of one row. Only the first tokens in descending order of probability can be sampled.

    Three stages look for a bound: of top-k, of top-p, and of the token itself. They share one loop, because
    three copies of the search would take the compiler twice as long.
    """
    lowest = tl.full([], LOWEST, tl.int64)
    kept = _amount(
        lowest, False, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks, HAS_MASK, SUBS
    )
    count = tl.full([], 0.0, tl.float64)
    if (top_k > 0) & (top_k < vocab):
        count = _amount(
            lowest, True, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
            HAS_MASK, SUBS,
        )  # fmt: skip
    likely = tl.full([], float("inf"), tl.float64)
    if min_p > 0.0:
        masses = tl.zeros([SUBS // 2, 8], tl.float64)
        every = tl.full([SUBS], 1, tl.int1)
        for chunk in range(chunks):
            if exp(tl.load(tops_row + chunk) - top) >= min_p:
                first = chunk * (SUBS * 32)
                x = load_block(logits_row, mask_row, masked, first, vocab, temperature, every, HAS_MASK, SUBS)
                weight_of = exp(x - top)
                masses += _in_thread(tl.where(weight_of >= min_p, weight_of, 0.0).to(tl.float64), SUBS)
        likely = tl.sum(tl.sum(masses, axis=1), axis=0)
    target = top_k.to(tl.float64)
    key = lowest
    above = tl.full([], 0.0, tl.float64)
    weight = tl.full([], 0.0, tl.float64)
    for stage in range(3):
        wanted = tl.where(stage == 0, count > top_k, (stage == 2) | (top_p < 1.0))
        if wanted:
            key, above, weight = _bound(
                target, stage == 2, stage == 0, logits_row, mask_row, masked, tops_row, top, temperature,
                vocab, chunks, HAS_MASK, SUBS,
            )  # fmt: skip
        if stage == 0:
            if wanted:
                mass = _amount(
                    key + 1, False, logits_row, mask_row, masked, tops_row, top, temperature, vocab, chunks,
                    HAS_MASK, SUBS,
                )  # fmt: skip
                kept = mass + (top_k - above) * weight
            target = top_p.to(tl.float64) * kept
        if stage == 1:
            total = tl.minimum(kept, likely)
            if wanted:
                total = tl.minimum(
                    total, above + tl.maximum(tl.ceil((target - above) / weight), 1.0) * weight
                )
            target = tl.minimum(uniform * total, below(total))
    nth = tl.maximum(tl.floor((target - above) / weight), 0.0).to(tl.int32)
    return _nth(key, nth, logits_row, mask_row, masked, tops_row, temperature, vocab, chunks, HAS_MASK, SUBS)
