"""The attention kernel compiled for GPUs that are not here: instructions, shared memory, every dtype."""

from __future__ import annotations

import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from ramify.kernels.triton.plan.attention_config import CHUNK, Tile, block_dim, tiles
from ramify.kernels.triton.tiles import attention_tile, merge
from tests.kernels.kernel_compiler import GENERATIONS, compiling, innermost_loops, usage

pytestmark = pytest.mark.slow

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
H100 = GENERATIONS[90].device


def compiled(function, types: dict[str, str], constants: dict, generation: int, **options) -> CompiledKernel:
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    aligned = [name for name in types if name.endswith(("_ptr", "_stride")) and name != "table_stride"]
    source = ASTSource(
        function,
        signature,
        {(function.arg_names.index(name),): value for name, value in constants.items()},
        {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    with compiling(generation):
        return triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)


def compile_attend(
    tile: Tile,
    head_dim: int,
    dtype: torch.dtype,
    generation: int,
    *,
    chunk: int = 0,
    pages: str = "",
    **flags,
) -> CompiledKernel:
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{TYPES[dtype]}")
    if pages:
        types |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{pages}")
    types |= dict.fromkeys(("part_ptr", "top_ptr", "total_ptr", "sink_ptr"), "*fp32")
    types |= dict.fromkeys(("table_ptr", "item_ptr", "token_ptr"), "*i32")
    strides = ("q_stride", "out_stride", "page_stride", "head_stride", "row_stride")
    types |= dict.fromkeys((*strides, "table_stride", "window"), "i32")
    types |= {"in_factor": "fp32", "out_factor": "fp32"}
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": head_dim, "BLOCK_D": block_dim(head_dim),
        "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "PAGE_SIZE": 64, "CHUNK": chunk, "LISTED": False,
        "WINDOWED": False, "SOFT_CAP": False, "SINKS": False, "PRECISION": "ieee", **flags,
    }  # fmt: skip
    return compiled(
        attention_tile.attend, types, constants, generation,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("generation", "head_dim"),
    [pytest.param(89, 128, marks=pytest.mark.long), (90, 128), pytest.param(90, 256, marks=pytest.mark.long)],
)
def test_tiles_use_tensor_cores_and_fit_the_shared_memory(generation, head_dim):
    """Blocks of keys arrive asynchronously; from 64 rows on Hopper multiplies by warp groups."""
    device = GENERATIONS[generation].device
    for tile in tiles(head_dim, torch.bfloat16, device):
        kernel = compile_attend(tile, head_dim, torch.bfloat16, generation)
        assert kernel.metadata.shared <= device.shared_bytes
        taken = usage(kernel, generation)
        assert taken.hot_spills == 0
        assert taken.programs >= 1
        assert taken.widths[16] > 0
        text = kernel.asm["ptx"]
        assert "cp.async" in text
        assert ("wgmma.mma_async" in text) == (generation == 90 and tile.rows >= 64)
        assert ("mma.sync" in text) != ("wgmma.mma_async" in text)


def test_each_tile_has_room_for_a_block():
    """Shared memory holds a block beside the queries: 128 rows of 256 numbers took 106,500 of an L40S's
    101,376 bytes."""
    for generation in GENERATIONS.values():
        for head_dim in (64, 128, 256):
            found = tiles(head_dim, torch.bfloat16, generation.device)
            assert [tile.rows for tile in found] == [16, 64, 128][: len(found)]
            assert len(found) == (2 if head_dim == 256 and generation.name in ("L40S", "RTX PRO 6000") else 3)
            for tile in found:
                block = 2 * tile.columns * head_dim * 2
                assert tile.rows * head_dim * 2 + block <= generation.device.shared_bytes


@pytest.mark.parametrize(
    ("generation", "sizes"),
    [(90, 1), *(pytest.param(each, 3, marks=pytest.mark.long) for each in (89, 90, 100, 120))],
)
def test_float8_pages_are_loaded_as_they_are(generation, sizes):
    """They arrive asynchronously and are converted in registers, so tiles take less shared memory than for
    bfloat16."""
    device = GENERATIONS[generation].device
    for tile in tiles(128, torch.bfloat16, device)[:sizes]:
        kernel = compile_attend(tile, 128, torch.bfloat16, generation, pages="fp8e4nv")
        wide = compile_attend(tile, 128, torch.bfloat16, generation)
        assert kernel.metadata.shared <= wide.metadata.shared <= device.shared_bytes
        older = generation == 120 and triton.__version__.startswith("3.6.")
        assert usage(kernel, generation).hot_spills <= (4 if older else 0)  # its assembler's doing
        assert "cp.async" in kernel.asm["ptx"]
        assert "e4m3x2" in kernel.asm["ptx"]


def test_two_blocks_are_on_their_way_on_a_hopper():
    """The page table takes every other stage: less, and each program waits for the memory at each block."""
    for tile in tiles(128, torch.bfloat16, H100):
        kernel = compile_attend(tile, 128, torch.bfloat16, 90)
        block = 2 * tile.columns * 128 * 2
        assert kernel.metadata.shared >= 2 * block


@pytest.mark.parametrize(
    ("windowed", "capped", "listed", "page_size"), [(True, False, False, 64), (False, True, True, 16)]
)
def test_every_flag_compiles(windowed, capped, listed, page_size):
    flags = {
        "WINDOWED": windowed,
        "SOFT_CAP": capped,
        "SINKS": windowed,
        "LISTED": listed,
        "PAGE_SIZE": page_size,
    }
    compile_attend(Tile(16, 64, 4, 2), 128, torch.float16, 90, **flags)


def test_the_deterministic_form_compiles_for_every_dtype():
    for dtype, head_dim in ((torch.bfloat16, 128), (torch.float32, 256)):
        (tile,) = tiles(head_dim, dtype, H100, deterministic=True)
        kernel = compile_attend(tile, head_dim, dtype, 90, chunk=CHUNK)
        assert kernel.metadata.shared <= H100.shared_bytes


def test_no_multiplication_is_fused_behind_our_back():
    """Only the written multiply-adds are fused, so that the bits do not depend on a compiler's version."""
    (tile,) = tiles(128, torch.bfloat16, H100, deterministic=True)
    kernel = compile_attend(tile, 128, torch.bfloat16, 90, chunk=CHUNK)
    assert usage(kernel, 90).hot_spills == 0, "states are put aside between chunks alone"
    text = kernel.asm["ptx"]
    assert "mul.rn.f32" in text
    assert not re.search(r"\b(mul|add|sub)\.(ftz\.)?f32", text), "what is not .rn may be fused"


def test_merge_compiles():
    pointers = dict.fromkeys(("part_ptr", "top_ptr", "total_ptr", "sink_ptr"), "*fp32") | {"out_ptr": "*bf16"}
    types = pointers | dict.fromkeys(("token_ptr", "start_ptr", "index_ptr"), "*i32") | {"out_stride": "i32"}
    constants = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 80, "BLOCK_D": 128, "AT_ONCE": 8, "SINKS": True}
    compiled(merge._merge, types, constants, 90, num_warps=1, enable_fp_fusion=False)


def test_spills_are_counted_where_matrices_are_multiplied():
    """Two loops within a third: only what lies in the innermost ones counts."""
    code = [
        (0x00, "STL [R1], R2"),
        (0x10, "HMMA.16816.F32 R4, R8"),
        (0x20, "@P0 BRA 0x10"),
        (0x30, "LDL R2, [R1]"),
        (0x40, "LDL R3, [R1]"),
        (0x50, "@!P1 BRA.U 0x40"),
        (0x60, "BRA 0x0"),
        (0x70, "BRA 0x70"),
    ]
    bodies = [[code[1][1], code[2][1]], [code[4][1], code[5][1]]]
    assert list(innermost_loops(code)) == bodies
