"""The Triton attention in the interpreter: against torch at its dtype, its promises about bits, refusals."""

from __future__ import annotations

import itertools

import pytest
import torch

from ramify.kernels.triton import attention
from ramify.kernels.triton.attention import plan_attention, plan_shape, run_plan
from ramify.kernels.triton.plan.attention_config import H100, Device, tiles
from ramify.kernels.triton.plan.attention_plan import Plan
from tests.kernels.attention_cases import Batch, alone, make_batch
from tests.kernels.cascade_cases import assert_as_good

HALF, FLOAT = torch.float16, torch.float32
MIXED = [(1, 1), (1, 70), (20, 20), (17, 90), (0, 5)]
SMALL = {"heads": 2, "kv_heads": 1, "dtype": HALF}


def check(batch: Batch, **options) -> torch.Tensor:
    options.setdefault("scale", batch.q.shape[-1] ** -0.5)
    out = torch.full_like(batch.q, torch.nan)
    assert attention.paged_attention(*batch, **options, out=out) is out
    options.pop("deterministic", None)
    assert_as_good(out, batch, **options)
    return out


def plan_of(batch: Batch, *, window: int = 0, deterministic: bool = False) -> Plan:
    shape = plan_shape(batch.q, batch.k_pages, window=window, deterministic=deterministic)
    return plan_attention(batch.query_starts, batch.kv_lens, shape, batch.q.device)


def forms(launches) -> set[tuple]:
    """The specialisations of the launches of `attend`."""
    names = ("BLOCK_M", "CHUNK", "LISTED", "WINDOWED", "SOFT_CAP")
    return {
        (
            *(form[name] for name in names),
            form["PAGE_SIZE"] % form["BLOCK_N"] == 0,
            form["HEAD_DIM"] < form["BLOCK_D"],
        )
        for form in launches.forms("attend")
    }


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [*((size, HALF) for size in (16, 64, 80, 96, 128, 256)), (16, FLOAT), (80, FLOAT), (256, FLOAT)],
    ids=str,
)
def test_head_dims(head_dim, dtype):
    check(make_batch(MIXED, head_dim=head_dim, heads=2, kv_heads=1, dtype=dtype))


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 31, 64, 128])
def test_page_sizes(page_size):
    check(make_batch(MIXED, page_size=page_size, **SMALL))
    if page_size in (3, 64):
        check(make_batch(MIXED, page_size=page_size, heads=2, kv_heads=1, dtype=FLOAT))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (24, 1), (131, 1)])
def test_head_groups(heads, kv_heads):
    check(make_batch([(1, 70), (3, 12)], heads=heads, kv_heads=kv_heads, head_dim=32, dtype=HALF))


@pytest.mark.parametrize(
    ("window", "soft_cap", "dtype"),
    [
        *((window, 0.0, HALF) for window in (1, 37, 64, 500)),
        (0, 2.0, HALF),
        (20, 30.0, HALF),
        (37, 0.0, FLOAT),
        (20, 30.0, FLOAT),
    ],
    ids=str,
)
def test_windows_and_soft_caps(window, soft_cap, dtype):
    batch = make_batch([(1, 300), *MIXED], page_size=5, heads=2, kv_heads=1, dtype=dtype)
    check(batch, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [0, 37])
def test_sinks_join_every_softmax_once(window, deterministic):
    batch = make_batch([(1, 1100), (3, 20), (2, 40)], heads=4, kv_heads=2, page_size=64, dtype=FLOAT)
    options = {"window": window, "deterministic": deterministic}
    result = check(batch, sinks=torch.tensor([-40.0, 1.0, 3.0, 40.0]), **options)
    assert (plan_of(batch, **options).merge is not None) == (window == 0), "some sequences are split"
    without = check(batch, **options)
    assert torch.allclose(result[:, 0], without[:, 0], atol=1e-6)
    assert not torch.allclose(result[:, 1], without[:, 1], atol=1e-3)
    assert result[:, 3].abs().max() < 1e-9


@pytest.mark.parametrize("deterministic", [False, True])
def test_pages_before_every_window_are_not_used(deterministic):
    batch = make_batch([(1, 300), (4, 200)], page_size=4, **SMALL)
    options = {"scale": 0.125, "window": 20, "deterministic": deterministic}
    expected = attention.paged_attention(*batch, **options)
    for row, first_seen in enumerate((280, 177)):
        dead = batch.page_table[row, : first_seen // 4].long()
        batch.k_pages[dead] = torch.nan
        batch.v_pages[dead] = torch.nan
    assert torch.equal(attention.paged_attention(*batch, **options), expected)
    assert not expected.isnan().any()


def test_large_scores_do_not_overflow():
    batch = make_batch([(2, 90)], heads=4, kv_heads=2)
    check(batch._replace(q=batch.q * 1e4), scale=1.0)


def test_nan_query_gives_nan_only_there():
    batch = make_batch([(4, 40)], **SMALL)
    batch.q[2, 1] = torch.nan
    result = attention.paged_attention(*batch, scale=0.125)
    assert result[2, 1].isnan().all()
    result[2, 1] = 0
    assert not result.isnan().any()


def test_long_sequences_are_split_and_merged():
    batch = make_batch([(1, 1500), (3, 20), (9, 1030)], page_size=64, **SMALL)
    check(batch)
    plan = plan_of(batch)
    assert plan.merge is not None
    merged = plan.merge.tokens.tolist()
    assert 0 in merged
    assert 1 not in merged, "the short sequence is written at once"
    begins = [item[5] for launch in plan.launches for item in launch.items.tolist()]
    assert len(set(begins)) > 3


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_every_form_of_the_kernel_is_reached(launches, soft_cap):
    """The forms are all tiles, with and without window, one page a block or many, padded heads or not."""
    lengths = [(1, 70), (20, 30), (40, 45)]  # 2, 40 and 80 rows a KV head
    cases = list(itertools.product((128, 80), (16, 64), (0, 33)))
    if soft_cap:
        cases = [(128, 16, 33), (128, 64, 0), (80, 16, 0), (80, 64, 33)]
    for head_dim, page_size, window in cases:
        batch = make_batch(lengths, heads=2, kv_heads=1, head_dim=head_dim, page_size=page_size, dtype=HALF)
        for deterministic in (False, True):
            check(batch, window=window, soft_cap=soft_cap, deterministic=deterministic)
    capped = soft_cap > 0
    sizes = [(16, 0), (64, 0), (128, 0), (64, 512)]
    flags = [(window > 0, page_size == 64, head_dim == 80) for head_dim, page_size, window in cases]
    assert forms(launches) == {
        (*size, False, windowed, capped, one, padded)
        for size, (windowed, one, padded) in itertools.product(sizes, flags)
    }


def test_tiles_fit_the_shared_memory_of_every_generation():
    for shared_bytes in (101376, 166912, 232448):  # RTX 4090, A100, H100
        device = Device(100, shared_bytes)
        for head_dim, dtype, deterministic in itertools.product((64, 80, 128, 256), (HALF, FLOAT), (0, 1)):
            for tile in tiles(head_dim, dtype, device, deterministic=bool(deterministic)):
                size = dtype.itemsize * (128 if head_dim == 80 else head_dim)
                assert tile.depth >= 1
                if shared_bytes > 150000 or head_dim < 256:
                    assert size * (tile.rows + 2 * tile.columns * (tile.depth + 1)) <= shared_bytes


# Changes that leave every bit of the deterministic form as it was.


def run_on(processors: int, batch: Batch, *, window: int = 0, **options) -> torch.Tensor:
    """The output planned for `processors` multiprocessors; one alone never cuts a sequence into parts."""
    shape = plan_shape(batch.q, batch.k_pages, window=window, deterministic=True)
    shape = shape._replace(device=Device(processors, H100.shared_bytes))
    plan = plan_attention(batch.query_starts, batch.kv_lens, shape, batch.q.device)
    span = int(batch.kv_lens.max()) - max(0, int(batch.kv_lens.min()) - window if window else 0)
    assert (plan.merge is not None) == (processors > 1 and span > 1000)
    return run_plan(plan, *batch[:4], torch.full_like(batch.q, torch.nan), **options)


@pytest.mark.parametrize(("page_size", "window", "soft_cap"), [(16, 0, 5.0), (64, 600, 0.0)])
def test_chunks_give_the_same_bits(page_size, window, soft_cap):
    whole = make_batch([(1060, 1060)], heads=1, kv_heads=1, page_size=page_size, head_dim=128, dtype=HALF)
    options = {"scale": 0.09, "window": window, "soft_cap": soft_cap}
    expected = run_on(1, whole, **options)
    for processors, low, high in (
        (132, 0, 1), (132, 511, 512), (132, 512, 513), (132, 1023, 1026), (132, 1059, 1060),
        (1, 500, 530), (1, 700, 1060),
    ):  # fmt: skip
        part = whole._replace(
            q=whole.q[low:high],
            query_starts=torch.tensor([0, high - low], dtype=torch.int32),
            kv_lens=torch.tensor([high], dtype=torch.int32),
        )
        assert torch.equal(run_on(processors, part, **options), expected[low:high])


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(dtype):
    lengths = [(1, 1300), (5, 1100), *MIXED, (1, 700)]
    batch = make_batch(lengths, page_size=5, heads=2, kv_heads=1, dtype=dtype)
    together = attention.paged_attention(*batch, scale=0.125, deterministic=True)
    for row in range(len(lengths)):
        low, high = batch.query_starts[row : row + 2].tolist()
        single = attention.paged_attention(*alone(batch, row), scale=0.125, deterministic=True)
        assert torch.equal(single, together[low:high])


def test_split_or_not_gives_the_same_bits():
    batch = make_batch([(1, 1300), (2, 1100)], **SMALL)
    results = [run_on(processors, batch, scale=0.125) for processors in (1, 132)]
    assert torch.equal(*results)
    assert not results[0].isnan().any()


def test_page_size_does_not_change_the_bits():
    results = [
        attention.paged_attention(
            *make_batch(MIXED, page_size=size, **SMALL), scale=0.125, deterministic=True
        )
        for size in (1, 5, 128)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("deterministic", [False, True])
def test_warming_up_launches_every_form_and_touches_nothing(launches, deterministic):
    batch = make_batch([(1, 40)], **SMALL)
    q = torch.full_like(batch.q, torch.nan)
    shape = plan_shape(q, batch.k_pages, window=3, deterministic=deterministic)
    attention.warm_up(shape, q, batch.k_pages, batch.v_pages, batch.page_table, soft_cap=2.0)
    rows, chunk = ((64,), 512) if deterministic else ((16, 64, 128), 0)
    assert forms(launches) == {
        (size, chunk, listed, True, True, False, False) for size in rows for listed in (False, True)
    }


# Shapes, strides, refusals.


def test_strided_queries_output_and_pools():
    batch = make_batch(MIXED, **SMALL)
    expected = attention.paged_attention(*batch, scale=0.125)
    tokens = len(batch.q)
    fused = torch.full((tokens, 6, 64), torch.nan, dtype=HALF)
    fused[:, 2:4] = batch.q
    out = torch.full((tokens, 5, 64), torch.nan, dtype=HALF)
    layers = torch.full((2, 2, *batch.k_pages.shape), torch.nan, dtype=HALF)
    layers[0, 1], layers[1, 1] = batch.k_pages, batch.v_pages
    strided = batch._replace(q=fused[:, 2:4], k_pages=layers[0, 1], v_pages=layers[1, 1])
    result = attention.paged_attention(*strided, scale=0.125, out=out[:, 1:3])
    assert torch.equal(result, expected)
    assert out[:, 0].isnan().all()
    assert out[:, 3:].isnan().all()


def test_nothing_new_gives_nothing():
    batch = make_batch([(0, 5), (0, 0)])
    assert attention.paged_attention(*batch, scale=1.0).shape == (0, 9, 64)
    empty = batch._replace(
        page_table=batch.page_table[:0], query_starts=batch.query_starts[:1], kv_lens=batch.kv_lens[:0]
    )
    assert attention.paged_attention(*empty, scale=1.0).shape == (0, 9, 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(2, 4)}, "q is"),
        ({"kv_lens": torch.tensor([1], dtype=torch.int32)}, "sequence 0"),
        ({"window": -1}, "window"),
        ({"scale": 0.0}, "scale"),
        ({"k_pages": torch.zeros(3, 1, 16, 64).double()}, "float32, float16, bfloat16"),
        ({"out": torch.empty(2, 2, 32)}, "out"),
    ],
    ids=itertools.count(),
)
def test_refusals_name_the_argument(change, words):
    arguments = {**make_batch([(2, 9)], **SMALL)._asdict(), "scale": 1.0, **change}
    with pytest.raises(ValueError, match=words):
        attention.paged_attention(**arguments)
