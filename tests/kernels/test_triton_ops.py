"""The small Triton kernels through Triton's compiler, for two generations of GPUs, without one."""

from __future__ import annotations

import re

import pytest
import torch

from ramify.kernels.arguments.sampling_inputs import LogitEdits, SamplingOptions
from ramify.kernels.machine.errors import KernelUnavailable
from ramify.kernels.registry import ops
from ramify.kernels.triton import (
    activation,
    experts,
    gated_delta,
    kv_store,
    logits,
    matmul,
    norm,
    rope,
    sampling,
)
from ramify.kernels.weights.stack import ExpertMatrices
from tests.kernels.delta_cases import Heads, Layer
from tests.kernels.float8_cases import weight_of
from tests.kernels.kernel_compiler import GENERATIONS, Compiled, compiling, usage
from tests.kernels.kernel_forms import cases, float8_cases, line, measure, quantised_cases, row_cases

pytestmark = pytest.mark.slow
LONG = pytest.mark.long

HALF = torch.bfloat16
ROUNDS = re.compile(r"cvt\.rn\.satfinite\.e4m3x2\.(f32|f16x2)")
"""Triton 3.6 goes by way of float16 before sm_90: exact, as `to_float8` has rounded before."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_a_device_the_backend_is_refused():
    with pytest.raises(KernelUnavailable, match="need a CUDA device"):
        ops("triton")


def texts_of(launches: list[Compiled]) -> dict[str, str]:
    """The PTX of each kernel's last launch."""
    return {launch.name: launch.ptx for launch in launches}


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_and_move_sixteen_bytes_at_once(capability):
    x, weight = torch.zeros(8, 4096, dtype=HALF), torch.zeros(4096, dtype=HALF)
    qkv = torch.zeros(8, 48, 128, dtype=HALF)
    q, k, v = qkv.split([32, 8, 8], dim=1)
    head = torch.zeros(128, dtype=HALF)
    pages = torch.zeros(3, 8, 16, 128, dtype=HALF)
    turn, slots = torch.zeros(8, 64, dtype=torch.complex64), torch.arange(8)
    with compiling(capability) as launches:
        norm.rms_norm(x, weight, 1e-5)
        norm.rms_norm(q, head, 1e-5)
        norm.add_rms_norm(x, x.clone(), weight, 1e-5)
        activation.silu_mul(x)
        kv_store.copy_pages(pages, pages.clone(), [0], [1])
        rope.rope_store_kv(q, k, v, turn, pages, pages.clone(), slots)
        rope.rope_store_kv(q, k, v, turn, pages, pages.clone(), slots, q_norm=head, k_norm=head)
    texts = texts_of(launches)
    assert set(texts) == {"_rms_norm", "_add_rms_norm", "_gated_mul", "_copy", "_rope_store"}
    for name, text in texts.items():
        assert "ld.global.v4.b32" in text, name
        assert "st.global.v4.b32" in text, name
        assert "st.shared.v4" not in text, f"{name} moves whole tiles between threads"


@pytest.mark.parametrize("capability", [89, 120])
def test_float8_pages_are_stored_and_copied(capability: int) -> None:
    q, k, v = torch.zeros(8, 48, 128, dtype=HALF).split([32, 8, 8], dim=1)
    pages = torch.zeros(3, 8, 64, 128, dtype=torch.float8_e4m3fn)
    turn, slots = torch.zeros(8, 64, dtype=torch.complex64), torch.arange(8)
    with compiling(capability) as launches:
        rope.rope_store_kv(q, k, v, turn, pages, pages.clone(), slots)
        kv_store.copy_pages(pages, pages.clone(), [0], [1])
    store, copy = (launch.ptx for launch in launches)
    assert ROUNDS.search(store)
    assert "st.global.v4.b32" in copy


@pytest.mark.parametrize("capability", [80, 90])
def test_products_take_the_tensor_cores(capability):
    x, weight = torch.zeros(300, 4096, dtype=HALF), torch.zeros(512, 4096, dtype=HALF)
    with compiling(capability) as launches:
        matmul.matmul(x, weight)
        matmul.matmul(x[:3], weight, weight[:, 0].contiguous())
    assert [launch.name for launch in launches] == ["_product", "_product", "_gather"]
    for text in (launch.ptx for launch in launches[:2]):
        assert ("wgmma.mma_async" if capability == 90 else "mma.sync") in text
        assert "st.local" not in text, "nothing is spilt"


TENSOR_CORES = {89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.parametrize("capability", [90, 120, pytest.param(89, marks=LONG), pytest.param(100, marks=LONG)])
def test_products_with_quantised_weights_take_the_tensor_cores(capability):
    """The cases are tiles of many rows, which need most registers."""
    chosen = [launch for case, launch in quantised_cases() if "int4 in groups of 128" in case][::3]
    chosen += [launch for case, launch in quantised_cases() if "fp8" in case][::3]
    with compiling(capability) as launches:
        for launch in chosen:
            launch()
    assert [launch.name for launch in launches] == 2 * ["_quantised_product"]
    for launch in launches:
        taken = usage(launch.kernel, capability)
        assert taken.hot_spills == 0
        assert taken.shared <= GENERATIONS[capability].device.shared_bytes
        assert TENSOR_CORES[capability] in launch.ptx
        assert "cp.async" in launch.ptx


@pytest.mark.parametrize(
    ("capability", "forms"),
    [(90, 1), (120, 1), *(pytest.param(each, 4, marks=LONG) for each in TENSOR_CORES)],
)
def test_products_of_float8_take_the_tensor_cores_for_it(capability: int, forms: int) -> None:
    """The cases have factors in blocks, which need most registers: many rows, few, and the deterministic
    form."""
    chosen = [launch for case, launch in float8_cases() if "groups of 128" in case]
    with compiling(capability) as launches:
        for launch in chosen[:forms]:
            launch()
    names = [launch.name for launch in launches if launch.name != "_gather"]
    assert names == forms * ["_round", "_float8_product"]
    for launch in launches:
        taken = usage(launch.kernel, capability)
        assert taken.shared <= GENERATIONS[capability].device.shared_bytes
        if launch.name == "_round":
            assert ROUNDS.search(launch.ptx)
        elif launch.name == "_float8_product":
            assert taken.hot_spills == 0
            assert taken.widths[16] > 0
            word = "f8f6f4" if capability == 100 else "f32.e4m3.e4m3"
            assert re.search(rf"{TENSOR_CORES[capability]}\S*{word}", launch.ptx)


def test_mixtures_of_experts_take_the_tensor_cores():
    x = torch.zeros(300, 2048, dtype=HALF)
    weights = ExpertMatrices(torch.zeros(8, 1536, 2048, dtype=HALF), torch.zeros(8, 2048, 768, dtype=HALF))
    chosen, shares = torch.zeros(300, 2, dtype=torch.int32), torch.zeros(300, 2)
    with compiling(90) as launches:
        for rows in (1, 300):
            experts.mixture(x[:rows], chosen[:rows], shares[:rows], weights)
    assert [launch.name for launch in launches] == 2 * ["_count", "_arrange", "_gate_up", "_down", "_sum"]
    for launch in launches:
        assert usage(launch.kernel, 90).spills == 0, launch.name
        if launch.name in ("_gate_up", "_down"):
            assert "mma" in launch.ptx
            assert "cp.async" in launch.ptx


@pytest.mark.parametrize("capability", [80, 120])
def test_the_gated_delta_rule_keeps_its_state_in_registers(capability):
    layer = Layer(Heads(16, 48, 128, 128), (3,), HALF)
    x = torch.zeros(4, 48, 128, dtype=HALF)
    with compiling(capability) as launches:
        layer.step(gated_delta.gated_delta_rule, [(0, 0, 3)], [0])
        gated_delta.output_gate(x, x, norm=(torch.ones(128), 1e-6))
    assert [launch.name for launch in launches] == ["_convolve", "_recur", "_gate"]
    for launch in launches:
        taken = usage(launch.kernel, capability)
        assert taken.spills == 0, launch.name
        assert taken.registers <= 128, launch.name


@pytest.mark.long
def test_sampling_compiles_and_moves_sixteen_bytes_at_once():
    x = torch.zeros(4, 128256, dtype=HALF)
    mask, mask_rows = torch.zeros(4, 4008, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    columns = [1.0] * 4, [5] * 4, [0.9] * 4, [0.1] * 4, [0.5] * 4
    edits = LogitEdits(torch.zeros(2, 7, dtype=torch.int32), torch.zeros(3, 7))
    with compiling(90) as launches:
        sampling.sample_tokens(x, SamplingOptions.from_columns(*columns), mask, mask_rows)
        logits.restore_logits(x, edits, logits.edit_logits(x, edits))
        logits.log_probabilities(x, torch.zeros(4, dtype=torch.int64), 5)
    texts = texts_of(launches)
    assert set(texts) == {"scan", "threshold", "collect", "_sample", "_edit", "_finish"}
    for name in ("scan", "collect", "_sample"):
        assert "ld.global.v4.b32" in texts[name], name
    assert "local" not in texts["scan"], "nothing is spilt"


def test_the_table_says_what_a_kernel_takes_and_what_does_not_compile():
    def fails():
        raise ValueError("out of resources")

    name, launch = next(row_cases())
    row, fault = measure(90, "", [(name, launch), (name, launch), ("odd", fails)])
    assert row["kernel"] == "_rms_norm"
    assert 0 < row["registers"] <= 255
    assert row["widths"][16] > 0
    assert "fault" not in row
    assert name in line(row)
    assert "FAULT: ValueError: out of resources" in line(fault)
    assert len([case for case, _ in cases(90) if "deterministic" in case]) >= 8


def test_a_dependent_launch_waits_for_the_one_before_it():
    """As a trial, norms, activations and the rotary store: each reads what others write behind the wait
    alone."""
    x, weight = torch.zeros(8, 4096, dtype=HALF), torch.zeros(4096, dtype=HALF)
    q, k, v = torch.zeros(8, 48, 128, dtype=HALF).split([32, 8, 8], dim=1)
    pages, slots = torch.zeros(3, 8, 64, 128, dtype=HALF), torch.arange(8)
    turn, matrix = torch.zeros(8, 64, dtype=torch.complex64), weight_of(8, 4096, 128)
    for trials in ((), ("dependent-launch",)):
        with compiling(90) as launches:
            kernels = ops("triton", float8=True, trials=("fused-rounding", *trials))
            assert kernels.add_rms_norm is not None
            assert kernels.silu_mul is not None
            assert kernels.float8 is not None
            kernels.rms_norm(x, weight, 1e-5)
            kernels.add_rms_norm(x, x.clone(), weight, 1e-5)
            kernels.silu_mul(x)
            kernels.rope_store_kv(q, k, v, turn, pages, pages.clone(), slots)
            kernels.float8.norm_float8(x, weight, 1e-5, matrix)
            kernels.float8.gate_float8(x.repeat(1, 2), matrix)
        for launch in launches:
            lines = launch.ptx.splitlines()
            waits = [at for at, line in enumerate(lines) if "griddepcontrol.wait" in line]
            writes = [at for at, line in enumerate(lines) if "st.global" in line]
            assert len(waits) == len(trials), launch.name
            assert launch.kernel.metadata.launch_pdl == bool(trials)
            assert "griddepcontrol.launch_dependents" in launch.ptx or not trials
            assert all(wait < write for wait in waits for write in writes), launch.name
