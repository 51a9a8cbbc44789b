"""The compiled attention against its reference and a float64 oracle, its bits, and its errors."""

from __future__ import annotations

import itertools
import threading
from typing import Any, NamedTuple

import pytest
import torch

from ramify.kernels.cpu import attention as cpu
from ramify.kernels.cpu.codegen.dots import DOTS
from ramify.kernels.cpu.linear import tiles_allowed
from ramify.kernels.machine import threads as team
from ramify.kernels.reference import attention as twin
from ramify.kernels.reference.kv_store import quantise_rows, read_rows

from .attention_cases import MIXED, Batch, alone, make_batch
from .cascade_cases import dense

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("one_thread")


class Way(NamedTuple):
    """A dtype, whether the weights of values may be rounded, which changes no float32, and whether pages are
    int8."""

    dtype: torch.dtype
    rounded: bool = False
    int8: bool = False

    def attend(self, *arguments: torch.Tensor, **options: Any) -> torch.Tensor:
        cpu.arena.memory[:] = 0xFF  # NaN in every float format: what a call before left must not matter
        return cpu.paged_attention(*self.stored(Batch(*arguments)), rounded=self.rounded, **options)

    def stored(self, batch: Batch) -> Batch:
        """The batch with its pages as this way stores them."""
        if not self.int8:
            return batch
        pages = {name: quantise_rows(getattr(batch, name).float()) for name in ("k_pages", "v_pages")}
        return batch._replace(**pages)


EXACT = Way(torch.float32)
WAYS = {"float32": EXACT, "bfloat16": Way(torch.bfloat16), "bfloat16-rounded": Way(torch.bfloat16, True)}
WAYS |= {
    "int8": Way(torch.float32, int8=True),
    "int8-bfloat16": Way(torch.bfloat16, int8=True),
    "int8-rounded": Way(torch.bfloat16, True, int8=True),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request) -> Way:
    return request.param


def check(batch: Batch, way: Way = EXACT, *, spread: float = 1.0, **options) -> torch.Tensor:
    """Compare kernel and twin with float64 attention: the kernel errs at most twice as much as the twin.

    A weight's relative error is its score's absolute one, so it grows with the spread of the scores.
    """
    options.setdefault("scale", batch.q.shape[-1] ** -0.5)
    stored = way.stored(batch)
    read = {name: read_rows(getattr(stored, name)) for name in ("k_pages", "v_pages")}
    exact = dense(batch._replace(**read), torch.float64, **options)
    poisoned = torch.full_like(batch.q, torch.nan)
    torch.set_num_threads(2)
    result = way.attend(*batch, **options, out=poisoned)
    torch.set_num_threads(1)
    assert result is poisoned
    error = (result.double() - exact).abs().max()
    twin_error = (twin.paged_attention(*stored, **options).double() - exact).abs().max()
    floor = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert error <= 2 * twin_error + floor
    relative = 1e-6 if batch.q.dtype == torch.float32 else 2**-8
    assert twin_error <= relative * max(1.0, spread) * exact.abs().max()
    return result


@pytest.mark.parametrize("head_dim", [8, 20, 32, 64, 80, 96, 112, 128, 256])
def test_head_dims(head_dim, way):
    check(make_batch(MIXED, head_dim=head_dim, dtype=way.dtype), way)


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 16, 31, 64])
def test_page_sizes(page_size, way):
    check(make_batch(MIXED, page_size=page_size, dtype=way.dtype), way)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 2), (5, 1), (8, 1), (12, 2), (131, 1)])
def test_head_groups(heads, kv_heads, way):
    lengths = MIXED if heads < 100 else [(1, 70), (9, 12)]
    check(make_batch(lengths, heads=heads, kv_heads=kv_heads, head_dim=32, dtype=way.dtype), way)


@pytest.mark.parametrize(
    ("window", "soft_cap"), [(1, 0.0), (37, 0.0), (64, 0.0), (500, 0.0), (0, 2.0), (20, 30.0)]
)
@pytest.mark.parametrize("page_size", [5, 16])
def test_windows_and_soft_caps(page_size, window, soft_cap, way):
    check(make_batch(MIXED, page_size=page_size, dtype=way.dtype), way, window=window, soft_cap=soft_cap)


def sinks_of(heads: int) -> torch.Tensor:
    """Sinks from far below all scores to far above."""
    return torch.linspace(-40.0, 40.0, heads)


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (20, 0.0), (0, 2.0)])
def test_sinks_join_every_softmax_once(window, soft_cap, way):
    batch = make_batch([*MIXED, (1, 2000)], page_size=5, dtype=way.dtype)
    options = {"window": window, "soft_cap": soft_cap}
    sinks = sinks_of(batch.q.shape[1])
    result = check(batch, way, sinks=sinks, **options)
    without = check(batch, way, **options)
    assert torch.allclose(result[:, 0], without[:, 0], atol=1e-6), "exp(-40) is nothing"
    assert result[:, -1].abs().max() < 1e-9, "exp(40) leaves nothing"
    assert not torch.allclose(result[:, 4], without[:, 4], atol=1e-2)


def test_sinks_keep_the_bits_of_splits_and_prefixes(way):
    shared = make_batch([(1, 2000)], dtype=way.dtype)
    batch = shared._replace(
        q=torch.randn(3, 9, 64).to(way.dtype),
        page_table=shared.page_table.repeat(3, 1),
        query_starts=torch.arange(4, dtype=torch.int32),
        kv_lens=torch.full((3,), 2000, dtype=torch.int32),
    )
    options = {"scale": 0.125, "sinks": sinks_of(9) / 10}
    flat = way.attend(*batch, **options, cascade=False)
    assert torch.equal(way.attend(*batch, **options), flat)
    assert cpu.arena.call.cascade_rows > 0
    torch.set_num_threads(7)
    assert torch.equal(way.attend(*batch, **options, cascade=False), flat)
    assert cpu.arena.call.split


def test_pages_before_every_window_are_not_used():
    batch = make_batch([(1, 300), (4, 200)], page_size=4)
    scale = 0.125
    expected = cpu.paged_attention(*batch, scale=scale, window=20)
    for row, first_seen in enumerate((280, 177)):
        dead = batch.page_table[row, : first_seen // 4].long()
        batch.k_pages[dead] = torch.nan
        batch.v_pages[dead] = torch.nan
        batch.page_table[row, : first_seen // 4] = 0
    assert torch.equal(cpu.paged_attention(*batch, scale=scale, window=20), expected)
    assert not expected.isnan().any()


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_scores_from_equal_to_far_apart(spread, way):
    batch = make_batch([(3, 200), (1, 129)], dtype=way.dtype)
    check(batch._replace(q=batch.q * spread), way, spread=spread)


def test_large_scores_do_not_overflow():
    batch = make_batch([(2, 90)])
    exact = dense(batch._replace(q=batch.q * 1e4), torch.float64, scale=1.0)
    result = cpu.paged_attention(*batch._replace(q=batch.q * 1e4), scale=1.0)
    assert torch.allclose(result.double(), exact, atol=1e-5)


def test_nan_query_gives_nan_only_there():
    batch = make_batch([(4, 40)])
    batch.q[2, 1] = torch.nan
    result = cpu.paged_attention(*batch, scale=0.125)
    assert result[2, 1].isnan().all()
    result[2, 1] = 0
    assert not result.isnan().any()


# Changes that leave every bit of the output as it was.


@pytest.mark.parametrize("window", [0, 45])
@pytest.mark.parametrize("page_size", [5, 16])
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(way, page_size, window):
    batch = make_batch([*MIXED, (120, 700)], page_size=page_size, dtype=way.dtype)
    together = way.attend(*batch, scale=0.125, window=window)
    for row in range(len(batch.kv_lens)):
        low, high = batch.query_starts[row : row + 2].tolist()
        single = way.attend(*alone(batch, row), scale=0.125, window=window)
        assert torch.equal(single, together[low:high])


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (45, 0.0), (0, 5.0)])
@pytest.mark.parametrize("heads", [3, 9, 24])
def test_prefill_chunks_and_decodes_give_the_same_bits(way, window, soft_cap, heads):
    whole = make_batch([(210, 210)], heads=heads, page_size=16, dtype=way.dtype)
    expected = way.attend(*whole, scale=0.125, window=window, soft_cap=soft_cap)
    for chunk in (1, 7, 64, 100):
        for low in range(0, 210, chunk):
            high = min(210, low + chunk)
            part = whole._replace(
                q=whole.q[low:high],
                query_starts=torch.tensor([0, high - low], dtype=torch.int32),
                kv_lens=torch.tensor([high], dtype=torch.int32),
            )
            result = way.attend(*part, scale=0.125, window=window, soft_cap=soft_cap)
            assert torch.equal(result, expected[low:high])


def test_page_size_does_not_change_the_bits(way):
    results = []
    for page_size in (1, 5, 64):
        batch = make_batch(MIXED, page_size=page_size, dtype=way.dtype)
        results.append(way.attend(*batch, scale=0.125))
    # The same numbers in pages of another size: `make_batch` draws them in the same order.
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# Each way of sharing out the work was reached, and all give the same bits.


@pytest.mark.parametrize("window", [0, 600])
def test_serial_team_and_split_agree(way, window):
    seen = set()
    batches = [
        make_batch([(1, 20)], heads=3, kv_heads=1, dtype=way.dtype),  # too little to share
        make_batch([(1, 2000)], dtype=way.dtype),  # few long items: split
        make_batch([(3, 900), (1, 2)], dtype=way.dtype),
        make_batch([(1, 300)] * 8, dtype=way.dtype),  # enough items as they are
        make_batch([(150, 150)], dtype=way.dtype),
    ]
    for batch in batches:
        torch.set_num_threads(1)
        expected = way.attend(*batch, scale=0.125, window=window)
        assert cpu.arena.call.working == 1
        assert not cpu.arena.call.split
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(way.attend(*batch, scale=0.125, window=window), expected)
            plan = cpu.arena.call
            seen.add((bool(plan.working > 1), bool(plan.split)))
    assert seen == {(False, False), (True, False), (True, True)}


def test_without_openmp_python_threads_do_the_same():
    batch = make_batch([(1, 2000), (64, 64)])
    expected = cpu.paged_attention(*batch, scale=0.125)
    assert team.team_entry() != team.python_team_entry(), "torch here is built with OpenMP"
    torch.set_num_threads(2)
    cpu.arena.call.team = team.python_team_entry()
    try:
        assert torch.equal(cpu.paged_attention(*batch, scale=0.125), expected)
    finally:
        cpu.arena.call.team = team.team_entry()
    assert cpu.arena.call.working == 2


def test_calls_from_several_threads_do_not_disturb_each_other():
    batches = [make_batch([(1, 100 + 300 * seed), (20, 40)], seed=seed) for seed in range(4)]
    expected = [cpu.paged_attention(*batch, scale=0.125) for batch in batches]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if not torch.equal(cpu.paged_attention(*batches[index], scale=0.125), expected[index]):
                wrong.append(index)

    torch.set_num_threads(2)
    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Shapes, strides, refusals.


@pytest.mark.parametrize("implementation", [cpu, twin], ids=["cpu", "torch"])
def test_strided_queries_output_and_pools(implementation):
    batch = make_batch(MIXED)
    expected = implementation.paged_attention(*batch, scale=0.125)
    tokens = len(batch.q)
    fused = torch.full((tokens, 15, 64), torch.nan)
    fused[:, 2:11] = batch.q
    out = torch.full((tokens, 12, 64), torch.nan)
    layers = torch.full((2, 2, *batch.k_pages.shape), torch.nan)  # keys and values of two layers in one pool
    layers[0, 1], layers[1, 1] = batch.k_pages, batch.v_pages
    strided = batch._replace(q=fused[:, 2:11], k_pages=layers[0, 1], v_pages=layers[1, 1])
    result = implementation.paged_attention(*strided, scale=0.125, out=out[:, 1:10])
    assert torch.equal(result, expected)
    assert out[:, 0].isnan().all()
    assert out[:, 10:].isnan().all()


@pytest.mark.parametrize("implementation", [cpu, twin], ids=["cpu", "torch"])
def test_nothing_new_gives_nothing(implementation):
    batch = make_batch([(0, 5), (0, 0)])
    assert implementation.paged_attention(*batch, scale=1.0).shape == (0, 9, 64)
    empty = batch._replace(
        page_table=batch.page_table[:0], query_starts=batch.query_starts[:1], kv_lens=batch.kv_lens[:0]
    )
    assert implementation.paged_attention(*empty, scale=1.0).shape == (0, 9, 64)


GOOD = make_batch([(2, 9), (1, 3)], heads=6, kv_heads=3)
INT32 = torch.int32


@pytest.mark.parametrize("implementation", [cpu, twin], ids=["cpu", "torch"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": GOOD.q[0]}, "q is"),
        ({"q": GOOD.q.half()}, "float16"),
        ({"q": GOOD.q.bfloat16()}, "bfloat16"),
        ({"q": GOOD.q[..., :32]}, "head_dim"),
        ({"q": GOOD.q[:, :5]}, "multiple"),
        ({"q": GOOD.q.transpose(1, 2).contiguous().transpose(1, 2)}, "contiguous"),
        ({"k_pages": GOOD.k_pages[:, :, :8]}, "alike"),
        ({"v_pages": GOOD.v_pages.transpose(2, 3).contiguous().transpose(2, 3)}, "alike"),
        ({"page_table": GOOD.page_table.long()}, "page_table"),
        ({"kv_lens": GOOD.kv_lens.long()}, "kv_lens"),
        ({"query_starts": GOOD.query_starts[:2]}, "query_starts"),
        ({"query_starts": torch.tensor([0, 2, 1], dtype=INT32)}, "sequence 1"),
        ({"query_starts": torch.tensor([0, 2, 4], dtype=INT32)}, "sequence 1"),
        ({"query_starts": torch.tensor([-1, 2, 3], dtype=INT32)}, "sequence 0"),
        ({"kv_lens": torch.tensor([1, 3], dtype=INT32)}, "sequence 0"),
        ({"kv_lens": torch.tensor([9, 33], dtype=INT32)}, "sequence 1"),
        ({"window": -1}, "window"),
        ({"soft_cap": -1.0}, "soft_cap"),
        ({"sinks": torch.zeros(5)}, "sinks"),
        ({"sinks": torch.zeros(6).double()}, "sinks"),
        ({"out": torch.empty(3, 6, 32)}, "out"),
    ],
    ids=itertools.count(),
)
def test_refusals_name_the_argument(implementation, change, words):
    arguments = {**GOOD._asdict(), "scale": 1.0, **change}
    with pytest.raises(ValueError, match=words):
        implementation.paged_attention(**arguments)


def test_good_arguments_of_the_refusals_are_good():
    check(GOOD)


@pytest.mark.skipif(
    not (DOTS or tiles_allowed()),
    reason="weights are rounded on AMD's processors with AVX512_BF16 and with AMX",
)
def test_rounded_weights_change_bfloat16_alone():
    for dtype in DTYPES:
        batch = make_batch(MIXED, dtype=dtype)
        ways = [cpu.paged_attention(*batch, scale=0.125, rounded=rounded) for rounded in (False, True)]
        assert torch.equal(*ways) == (dtype == torch.float32)
