"""Sampling tokens without sorting the vocabulary: threads take a row each.

    for row:                                            threads take rows in turn
        x = logits, -inf where masked;  top = max(x)
        w = exp((x - top) / temperature)
        without top-k and top-p: walk the ids until the sum of w passes u · Σw
        else: for bucket, most likely first: add its mass whole, or sort and walk its tokens

Memory: a thread's scratch has a row of weights, then keys, sums and counts of buckets, and candidates. The
passes over a row's logits bound the speed: a few tens of microseconds for 50,000 tokens.

A token's weight is its probability divided by the largest probability, so it lies in (0, 1]. The upper bits
of such a float32 name one of 2,033 buckets, 16 to a power of two. One pass counts the tokens and the mass of
each bucket. Then the buckets are walked down from the most likely bucket: a bucket is skipped whole if the
draw and all limits lie beyond it, and only a bucket in which one of them ends is sorted.

Example with weights 1, 0.9, 0.5, 0.45, 0.05, top-p 0.9 and uniform 0.6:

    total mass              2.9; top-p limit 0.9 * 2.9 = 2.61
    kept                    1, 0.9, 0.5, 0.45: the mass before each is below 2.61; their mass is 2.85
    target                  0.6 * 2.85 = 1.71
    walk                    1 does not pass 1.71, 1 + 0.9 = 1.9 does: the second token is drawn
"""

from __future__ import annotations

import numpy as np
import torch
from numba import types
from torch import Tensor

from ramify.kernels.arguments.sampling_inputs import SamplingOptions, check_logits, check_mask, check_options
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import callback, carray, compiled, part
from ramify.kernels.cpu.codegen.functions import run_body
from ramify.kernels.cpu.codegen.simd import LANES, LOG2_E
from ramify.kernels.machine.records import Arena, record

FRAME = record(
    "logits", "logits_row", "rows", "vocab", "padded", "mask", "mask_row", "mask_rows", "options", "tokens",
    "scratch_bytes", "threads", "team", "body", "arena", "arena_bytes",
)  # fmt: skip
"""The arguments of one call, which its threads share. At `arena` are the numbers of the next row and of the
next thread, then each thread's scratch memory."""
COUNTER_BYTES = 64

BUCKET_SHIFT = 19
"""Lower bits of a float32, dropped to get its bucket: the exponent and 4 bits of the fraction remain."""
BUCKETS = (0x3F800000 >> BUCKET_SHIFT) + 1
BLOCK = 1024
"""Numbers of a block: passes take the maximum or sum of each block, then look at the numbers of one block."""
LIKELY = 2.0**-10
"""Tokens of at least this weight are tried first. They are few, and top-k or top-p seldom needs others."""
SERIAL_NUMBERS = 1 << 14
"""Calls of fewer logits run on one thread: a second thread would not help."""


@part
def _argmax(at, count):  # type: ignore[no-untyped-def]
    """The largest of `count` numbers at an address, and the first index at which it stands."""
    top, block = np.float32(-np.inf), 0
    whole = count - count % LANES
    for first in range(0, whole, BLOCK):
        best = vl.splat_f32(-np.inf)
        for i in range(first, min(first + BLOCK, whole), LANES):
            best = vl.maximum(vl.load(at + 4 * i), best)
        found = vl.max_lanes(best)
        if found > top:
            top, block = found, first
    for i in range(whole, count):
        if vl.read_f32(at + 4 * i) > top:
            return _argmax_of_rest(at, i, count)
    for i in range(block, count):
        if vl.read_f32(at + 4 * i) == top:
            return top, i
    return top, 0


@part
def _argmax_of_rest(at, first, count):  # type: ignore[no-untyped-def]
    top, place = vl.read_f32(at + 4 * first), first
    for i in range(first + 1, count):
        if vl.read_f32(at + 4 * i) > top:
            top, place = vl.read_f32(at + 4 * i), i
    return top, place


@part
def _copy(frame, at, mask, x):  # type: ignore[no-untyped-def]
    """Copy a row of logits to x, with -inf for padding and forbidden tokens; `mask` 0 means no mask."""
    whole = frame.vocab - frame.vocab % LANES
    for i in range(0, whole, LANES):
        vl.store(x + 4 * i, vl.load(at + 4 * i))
    for i in range(whole, frame.padded):
        vl.write_f32(x + 4 * i, vl.read_f32(at + 4 * i) if i < frame.vocab else np.float32(-np.inf))
    if not mask:
        return
    for word in range((frame.vocab + 31) // 32):
        bits = vl.read_i32(mask + 4 * word)
        if bits == -1:
            continue
        first = 32 * word
        for token in range(first, min(first + 32, frame.vocab)):
            if not (bits >> (token - first)) & 1:
                vl.write_f32(x + 4 * token, np.float32(-np.inf))


@part
def _weigh(frame, x, top, temperature):  # type: ignore[no-untyped-def]
    """Turn logits x into weights exp((x - top) / temperature): 1 for the most likely token."""
    scale = vl.splat_f32(temperature)
    highest = vl.div(vl.splat_f32(top), scale)
    log2_e = vl.splat_f32(LOG2_E)
    for i in range(0, frame.padded, LANES):
        vl.store(x + 4 * i, vl.exp2(vl.mul(vl.sub(vl.div(vl.load(x + 4 * i), scale), highest), log2_e)))


@part
def _mass(x, first, last, least):  # type: ignore[no-untyped-def]
    """The float64 sum of the weights in ``[first, last)`` that are at least `least`."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    i = first
    while i + 4 <= last:
        p, q = vl.read_f32(x + 4 * i), vl.read_f32(x + 4 * i + 4)
        r, s = vl.read_f32(x + 4 * i + 8), vl.read_f32(x + 4 * i + 12)
        a += np.float64(p) if p >= least else 0.0
        b += np.float64(q) if q >= least else 0.0
        c += np.float64(r) if r >= least else 0.0
        d += np.float64(s) if s >= least else 0.0
        i += 4
    while i < last:
        p = vl.read_f32(x + 4 * i)
        a += np.float64(p) if p >= least else 0.0
        i += 1
    return (a + b) + (c + d)


@part
def _target(uniform, total):  # type: ignore[no-untyped-def]
    """The cumulative mass at which a draw ends: uniform * total, which is kept below `total`."""
    target = uniform * total
    return target if target < total else np.nextafter(total, 0.0)


@part
def _sample_in_id_order(frame, x, uniform, min_p):  # type: ignore[no-untyped-def]
    """The token at which the cumulative mass, in the order of the ids, passes the target."""
    total = 0.0
    for first in range(0, frame.vocab, BLOCK):
        total += _mass(x, first, min(first + BLOCK, frame.vocab), min_p)
    target = _target(uniform, total)
    before, chosen = 0.0, 0
    for first in range(0, frame.vocab, BLOCK):
        last = min(first + BLOCK, frame.vocab)
        mass = _mass(x, first, last, min_p)
        if before + mass <= target:
            before += mass
            continue
        for token in range(first, last):
            weight = vl.read_f32(x + 4 * token)
            if weight >= min_p and weight > 0:
                before += np.float64(weight)
                chosen = token
                if before > target:
                    return chosen
        # Rounding: the sum of the block's weights was smaller one by one than in fours. Take its last token.
        return chosen
    return chosen


@part
def _bits(x, token):  # type: ignore[no-untyped-def]
    """The bits of a weight as an integer; weights are not negative, so the integers have the order of the
    weights."""
    return np.int64(vl.read_i32(x + 4 * token))


@part
def _gather(frame, x, least, candidates):  # type: ignore[no-untyped-def]
    """List the tokens of weight >= `least` in the order of their ids; return their number."""
    count = 0
    for first in range(0, frame.padded, LANES):
        if vl.max_lanes(vl.load(x + 4 * first)) < least:
            continue
        for token in range(first, min(first + LANES, frame.vocab)):
            weight = vl.read_f32(x + 4 * token)
            if weight >= least and weight > 0:
                candidates[count] = token
                count += 1
    return count


@part
def _sift(keys, root, end):  # type: ignore[no-untyped-def]
    while 2 * root + 1 < end:
        child = 2 * root + 1
        if child + 1 < end and keys[child] < keys[child + 1]:
            child += 1
        if keys[root] >= keys[child]:
            return
        keys[root], keys[child] = keys[child], keys[root]
        root = child


@part
def _sort(keys, count):  # type: ignore[no-untyped-def]
    """Sort ascending, in place: a heap sort, whose time does not depend on the input's order."""
    for root in range(count // 2 - 1, -1, -1):
        _sift(keys, root, count)
    for end in range(count - 1, 0, -1):
        keys[0], keys[end] = keys[end], keys[0]
        _sift(keys, 0, end)


@part
def _list_bucket(x, candidates, count, bucket, keys):  # type: ignore[no-untyped-def]
    """List the tokens of a bucket, the most likely first and the lower id first among equals; return their
    number. A key has the negated bits of the weight above the id, so ascending keys give that order.
    """
    found = 0
    for place in range(count):
        token = candidates[place]
        bits = _bits(x, token)
        if bits >> BUCKET_SHIFT == bucket:
            keys[found] = (-bits << 32) | token
            found += 1
    _sort(keys, found)
    return found


@part
def _walk_buckets(  # type: ignore[no-untyped-def]
    x, candidates, listed, counts, masses, keys, most, limit, least, least_bucket, target
):
    """Accumulate mass from the most likely token down. Stop after `most` tokens, before a token of weight
    below `least`, once the mass has reached `limit`, or when the mass passes `target`.

    Returns the mass and the last token.
    """
    seen, mass, last = 0, 0.0, 0
    for bucket in range(BUCKETS - 1, -1, -1):
        if counts[bucket] == 0:
            continue
        after = mass + masses[bucket]
        inside = seen + counts[bucket] <= most and after < limit and after <= target
        if inside and bucket > least_bucket:
            seen += counts[bucket]
            mass = after
            continue
        found = _list_bucket(x, candidates, listed, bucket, keys)
        for index in range(found):
            token = keys[index] & 0xFFFFFFFF
            weight = vl.read_f32(x + 4 * token)
            if seen >= most or mass >= limit or weight < least:
                return mass, last
            mass += np.float64(weight)
            seen += 1
            last = token
            if mass > target:
                return mass, last
        # Use the bucket's own sum, as where it is skipped whole: all walks of a draw must get the same total.
        mass = after
        if mass > target:
            return mass, last
    return mass, last


@part
def _sample_in_rank_order(frame, x, scratch, uniform, top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    """The draw in descending order of probability, for rows with top-k or top-p."""
    keys = carray(vl.as_pointer(scratch), frame.vocab, np.int64)
    masses = carray(vl.as_pointer(scratch + 8 * frame.vocab), BUCKETS, np.float64)
    counts = carray(vl.as_pointer(scratch + 8 * (frame.vocab + BUCKETS)), BUCKETS, np.int64)
    candidates = carray(vl.as_pointer(scratch + 8 * (frame.vocab + 2 * BUCKETS)), frame.vocab, np.int64)
    most = top_k if top_k > 0 else frame.vocab
    limit = np.inf
    if top_p < 1 and top_k <= 0:
        limit = np.float64(top_p) * _mass(x, 0, frame.vocab, np.float32(0))
    listed = _gather(frame, x, np.float32(LIKELY), candidates)
    enough = min_p >= np.float32(LIKELY) and (top_p >= 1 or top_k <= 0)
    if not enough and top_k > 0:
        enough = listed >= top_k
    elif not enough:
        mass = 0.0
        for place in range(listed):
            mass += np.float64(vl.read_f32(x + 4 * candidates[place]))
        enough = mass >= limit
    if not enough:
        listed = _gather(frame, x, np.float32(0), candidates)
    counts[:] = 0
    masses[:] = 0.0
    for place in range(listed):
        token = candidates[place]
        bucket = _bits(x, token) >> BUCKET_SHIFT
        counts[bucket] += 1
        masses[bucket] += np.float64(vl.read_f32(x + 4 * token))
    vl.write_f32(scratch, min_p)
    least = np.int64(vl.read_i32(scratch)) >> BUCKET_SHIFT if min_p > 0 else -1
    zero = np.float32(0)
    if top_p < 1 and top_k > 0:
        mass = _walk_buckets(x, candidates, listed, counts, masses, keys, most, np.inf, zero, -1, np.inf)[0]
        limit = np.float64(top_p) * mass
    total = _walk_buckets(x, candidates, listed, counts, masses, keys, most, limit, min_p, least, np.inf)[0]
    target = _target(uniform, total)
    return _walk_buckets(x, candidates, listed, counts, masses, keys, most, limit, min_p, least, target)[1]


@part
def _draw(frame, row, scratch):  # type: ignore[no-untyped-def]
    at, mask = frame.logits + row * frame.logits_row, 0
    which = np.int64(vl.read_i32(frame.mask_rows + 4 * row)) if frame.mask_rows else row
    if frame.mask and which >= 0:
        mask = frame.mask + which * frame.mask_row
    options = carray(vl.as_pointer(frame.options), 5 * frame.rows, np.float64)
    temperature, top_k = np.float32(options[row]), np.int64(options[frame.rows + row])
    top_p, min_p = np.float32(options[2 * frame.rows + row]), np.float32(options[3 * frame.rows + row])
    if not temperature > 0 and not mask:
        return _argmax(at, frame.vocab)[1]
    x = scratch
    _copy(frame, at, mask, x)
    top, best = _argmax(x, frame.vocab)
    if not temperature > 0 or top == -np.inf:
        return best
    _weigh(frame, x, top, temperature)
    uniform = options[4 * frame.rows + row]
    if top_k > 0 or top_p < 1:
        return _sample_in_rank_order(frame, x, scratch + 4 * frame.padded, uniform, top_k, top_p, min_p)
    return _sample_in_id_order(frame, x, uniform, min_p)


@callback(types.void(types.voidptr))
def _body(data):  # type: ignore[no-untyped-def]
    frame = carray(data, 1, FRAME)[0]
    thread = vl.fetch_increment(frame.arena + 8)
    scratch = frame.arena + COUNTER_BYTES + thread * frame.scratch_bytes
    row = vl.fetch_increment(frame.arena)
    while row < frame.rows:
        vl.write_i64(frame.tokens + 8 * row, _draw(frame, row, scratch))
        row = vl.fetch_increment(frame.arena)


@compiled(types.int64(types.int64))
def _sample_rows(call_at):  # type: ignore[no-untyped-def]
    """Sample the rows of the FRAME at `call_at`. Returns 0 when done, else the bytes that the arena must
    have."""
    frame = carray(vl.as_pointer(call_at), 1, FRAME)[0]
    needed = COUNTER_BYTES + frame.threads * frame.scratch_bytes
    if needed > frame.arena_bytes:
        return needed
    vl.write_i64(frame.arena, 0)
    vl.write_i64(frame.arena + 8, 0)
    run_body(frame, call_at, frame.threads)
    return 0


arena = Arena(FRAME, _body.address)


def sample_tokens(
    logits: Tensor, options: SamplingOptions, mask: Tensor | None = None, mask_rows: Tensor | None = None
) -> Tensor:
    """As `reference.sampling.sample_tokens`, for float32 logits."""
    check_logits(logits)
    check_options(logits, options)
    check_mask(logits, mask, mask_rows)
    if logits.dtype != torch.float32:
        raise ValueError(f"logits are {logits.dtype}; here they must be float32.")
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    if rows == 0:
        return tokens
    call = arena.call
    call.logits, call.logits_row, call.rows, call.vocab = logits.data_ptr(), 4 * logits.stride(0), rows, vocab
    call.padded = -(-vocab // LANES) * LANES
    call.mask, call.mask_row = (0, 0) if mask is None else (mask.data_ptr(), 4 * mask.stride(0))
    call.mask_rows = 0 if mask_rows is None else mask_rows.data_ptr()
    call.options, call.tokens = options.values.data_ptr(), tokens.data_ptr()
    call.scratch_bytes = -(-(4 * call.padded + 16 * (vocab + BUCKETS)) // 64) * 64
    call.threads = 1 if rows * vocab < SERIAL_NUMBERS else min(rows, torch.get_num_threads())
    arena.finish(_sample_rows)
    return tokens
