"""Products of which masks allow few outputs: allowed outputs have the bits of the whole product."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.cpu import linear_masked
from ramify.kernels.registry import ops
from ramify.kernels.weights.packed import PackedWeight, pack
from ramify.kernels.weights.rows import Rows, quantised
from tests.kernels.backends import CPU

OUTPUTS = 16 * 300 + 7


def packed(form: str, outputs: int = OUTPUTS, inputs: int = 64) -> PackedWeight:
    plain = torch.randn(outputs, inputs)
    if form in ("f32", "bf16"):
        return pack(Rows(plain if form == "f32" else plain.bfloat16()), inputs=inputs)
    return pack(quantised(plain, form, 32), inputs=inputs)


def bits(allowed: torch.Tensor) -> torch.Tensor:
    """(rows, outputs) bool as (rows, words) int32."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32))
    weights = 2 ** torch.arange(32)
    return (padded.view(len(allowed), -1, 32) * weights).sum(-1).to(torch.int32)


def allowing(*counts: int, outputs: int = OUTPUTS) -> torch.Tensor:
    """(rows, outputs) bool with `counts[row]` random outputs allowed in each row."""
    return torch.stack([torch.randperm(outputs) < count for count in counts])


def check(x: torch.Tensor, weight: PackedWeight, allowed: torch.Tensor, free: tuple[int, ...] = ()) -> int:
    """The number of rows that skipped panels. Rows in `free` have no mask."""
    rows, place = torch.full((len(x),), -1, dtype=torch.int32), 0
    kept = [row for row in range(len(x)) if row not in free]
    for row in reversed(kept):  # masks in another order than rows
        rows[row], place = place, place + 1
    mask = bits(allowed[list(reversed(kept))]) if kept else torch.zeros(1, -(-weight.outputs // 32)).int()
    expected = CPU.linear(x, weight, out=torch.empty(len(x), weight.outputs))
    found = torch.full((len(x), weight.outputs), torch.nan)
    assert CPU.masked_linear(x, weight, mask, rows, out=found) is found
    seen = allowed.clone()
    seen[list(free)] = True
    assert torch.equal(found[seen], expected[seen])
    assert ((found == expected) | (found == -torch.inf)).all()
    return int(linear_masked.arena.call.few)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["f32", "bf16", "int8", "int4"])
def test_what_masks_allow_has_the_bits_of_the_whole_product(form, dtype):
    weight = packed(form)
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for rows in (1, 3, 4, 8, 20, 37):
        x = torch.randn(rows, 64).to(dtype)
        few = [int(torch.randint(1, 20, (), generator=generator)) for _ in range(rows)]
        assert check(x, weight, allowing(*few)) > 0
        draw = torch.randint(0, 4, (rows,), generator=generator).tolist()
        counts = [[3, 40, 2000, OUTPUTS][kind] for kind in draw]
        free = tuple(row for row, kind in enumerate(draw) if kind == 3)
        taken = check(x, weight, allowing(*counts), free)
        assert taken <= rows - len(free)
        seen.add(0 if taken == 0 else 1 if taken < rows else 2)
    assert 1 in seen


def test_where_all_rows_are_free_or_masks_allow_much_nothing_is_left_out():
    weight, x = packed("int4"), torch.randn(5, 64).bfloat16()
    assert check(x, weight, allowing(*[OUTPUTS] * 5), free=(0, 1, 2, 3, 4)) == 0
    assert check(x, weight, allowing(*[OUTPUTS] * 5)) == 0
    assert check(x, weight, allowing(*[1500] * 5)) == 0


def test_only_the_panels_that_are_touched_are_computed():
    weight, x = packed("bf16"), torch.randn(2, 64).bfloat16()
    allowed = torch.zeros(2, OUTPUTS, dtype=torch.bool)
    allowed[0, [0, 5, 16]] = True
    allowed[1, [OUTPUTS - 1, 17]] = True
    assert check(x, weight, allowed) == 2
    assert linear_masked.arena.call.chosen_count == 4  # panels 0, 1 and the last, and one to fill an item


def test_rows_that_need_little_do_not_wait_for_those_that_need_much():
    weight, x = packed("int4"), torch.randn(16, 64).bfloat16()
    assert check(x, weight, allowing(*[4] * 8, *[3000] * 8)) == 8


def test_a_mask_that_allows_nothing():
    weight, x = packed("bf16"), torch.randn(2, 64).bfloat16()
    found = CPU.masked_linear(
        x, weight, torch.zeros(1, -(-OUTPUTS // 32), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    )
    assert (found == -torch.inf).all()


@pytest.mark.parametrize("outputs", [1, 15, 33, 65, 100])
def test_bits_beyond_the_last_output_touch_nothing(outputs):
    weight, x = packed("bf16", outputs), torch.randn(3, 64).bfloat16()
    mask = torch.full((1, -(-outputs // 32)), -1, dtype=torch.int32)
    found = CPU.masked_linear(x, weight, mask, torch.zeros(3, dtype=torch.int32))
    assert torch.equal(found, CPU.linear(x, weight, out=torch.empty(3, outputs)))


@pytest.mark.usefixtures("threads_as_before")
def test_threads_and_calls_before_change_no_bit():
    weight = packed("int4")
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for rows in (9, 2, 30):
            assert check(torch.randn(rows, 64).bfloat16(), weight, allowing(*[5] * rows)) > 0


@pytest.mark.parametrize("backend", [CPU, ops("torch")], ids=["cpu", "torch"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask": torch.zeros(1, 3, dtype=torch.int32)}, "mask is"),
        ({"mask": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]}, "mask"),
        ({"mask_rows": torch.zeros(2, dtype=torch.int32)}, "mask_rows"),
        ({"x": torch.zeros(3, 16)}, "x is"),
        ({"out": torch.zeros(3, 50).bfloat16()}, "out is"),
        ({"weight": pack(Rows(torch.zeros(100, 64)), inputs=64, gated=True)}, "gated"),
    ],
)
def test_refusals_name_the_argument(backend, change, words):
    arguments = {
        "x": torch.zeros(3, 64),
        "weight": packed("bf16", 50),
        "mask": torch.zeros(1, 2, dtype=torch.int32),
        "mask_rows": torch.zeros(3, dtype=torch.int32),
        **change,
    }
    with pytest.raises(ValueError, match=words):
        backend.masked_linear(**arguments)
