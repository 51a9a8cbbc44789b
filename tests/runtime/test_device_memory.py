"""Devices, backends and memory: the numbers that a configuration gives, and options refused by name."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ramify.errors import EngineError, UnsupportedField
from ramify.kernels.registry import ops
from ramify.model_info import KvRoom
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor import build
from ramify.runtime.executor import device as devices
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.build import build_runner
from ramify.runtime.executor.decode_graphs import ladder
from ramify.runtime.executor.device import (
    resolve_device,
    resolve_dtype,
    resolve_ops,
    resolve_page_dtype,
)
from ramify.runtime.executor.kv_pool import KvPool, page_bytes
from ramify.runtime.executor.memory import (
    COW_PAGES,
    CPU_TOKENS,
    LEAST_PAGES,
    DeviceMemory,
    PageBudget,
    free_for_pages,
    pages_in,
    pages_left,
    room_of,
    with_defaults,
    with_defaults_of,
)
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.shape.quantised_config import Quantised

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def of_capability(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the compute capability of the CUDA device."""

    def capable(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    return capable


def test_without_cuda_auto_is_the_cpu(no_cuda: None) -> None:
    config = EngineConfig()
    assert resolve_device(config) == CPU
    assert resolve_ops(config, CPU)[0] == "cpu"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"device": "cuda"}, "device"),
        ({"attention_backend": "triton"}, "attention_backend"),
        ({"attention_backend": "torch", "deterministic": True}, "deterministic"),
        ({"memory_fraction": 0.5}, "memory_fraction"),
        ({"cuda_graphs": True}, "cuda_graphs"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"attention_backend": "torch", "cascade": True}, "cascade"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_loaded(
    no_cuda: None, options: dict[str, Any], field: str
) -> None:
    def load(*_: Any) -> Any:
        raise AssertionError("loaded")

    with pytest.raises(UnsupportedField, match=field) as refused:
        build_runner(EngineConfig(**options), load)
    assert refused.value.field == field
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("backend", "device", "capability", "found"),
    [
        ("triton", CUDA, (8, 9), torch.float8_e4m3fn),
        ("torch", CPU, None, torch.float8_e4m3fn),
        ("triton", CUDA, (8, 6), None),
        ("cpu", CPU, None, None),
    ],
)
def test_fp8_pages_are_where_there_is_float8(
    of_capability: Any, backend: Any, device: torch.device, capability: Any, found: Any
) -> None:
    of_capability(capability)
    config = EngineConfig(kv_cache_dtype="fp8")
    assert resolve_page_dtype(EngineConfig(), backend, device, torch.bfloat16) == torch.bfloat16
    if found is not None:
        assert resolve_page_dtype(config, backend, device, torch.bfloat16) == found
        return
    with pytest.raises(UnsupportedField, match="kv_cache_dtype is 'fp8', and") as refused:
        resolve_page_dtype(config, backend, device, torch.bfloat16)
    assert refused.value.field == "kv_cache_dtype"


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_int8_pages_are_on_the_cpu_alone(backend: Any) -> None:
    config = EngineConfig(kv_cache_dtype="int8")
    for own in ("cpu", "torch"):
        assert resolve_page_dtype(config, own, CPU, torch.bfloat16) == torch.int8
    with pytest.raises(UnsupportedField, match=f"kv_cache_dtype is 'int8', and the {backend}") as refused:
        resolve_page_dtype(config, backend, CUDA, torch.bfloat16)
    assert refused.value.field == "kv_cache_dtype"


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_int8_pages_hold_more_tokens_and_the_same_sense(tiny_model: Any, backend: Any) -> None:
    shape, ids, rows = tiny_model.config, np.arange(40, dtype=np.int32) % 50, []
    numbers = 2 * shape.num_layers * shape.num_kv_heads * 16
    assert page_bytes(shape, 16, torch.int8) == numbers * (shape.head_dim + 4)
    for kept in ("auto", "int8"):
        options = EngineConfig(attention_backend=backend, num_pages=5, dtype="float32", kv_cache_dtype=kept)
        runner = build_runner(options, lambda *_: tiny_model)
        assert runner.pool.page_bytes == page_bytes(shape, 16, runner.pool.k.dtype)
        runner.forward(pack([Extension(ids, 0, 39, range(3))], 16))
        runner.pool.write_pages([4, 3], runner.pool.read_pages([0, 1]))
        runner.copy_pages([(2, 0)])
        rows.append(runner.logits(runner.forward(pack([Extension(ids, 39, 40, (4, 3, 0))], 16))))
    exact, found = rows
    assert not torch.equal(exact, found)
    assert (found - exact).abs().max() < 0.02 * exact.abs().max()


def test_fp8_pages_hold_twice_the_tokens_and_the_same_sense(tiny_model: Any) -> None:
    """FP8 pages are half as large as bfloat16 pages. Their logits are near those of float32 pages."""
    shape, ids, rows = tiny_model.config, np.arange(40, dtype=np.int32) % 50, []
    assert 2 * page_bytes(shape, 16, torch.float8_e4m3fn) == page_bytes(shape, 16, torch.bfloat16)
    for kept in ("auto", "fp8"):
        options = EngineConfig(attention_backend="torch", num_pages=5, dtype="float32", kv_cache_dtype=kept)
        runner = build_runner(options, lambda *_: tiny_model)
        runner.forward(pack([Extension(ids, 0, 39, range(3))], 16))
        runner.pool.write_pages([4, 3, 2], runner.pool.read_pages([0, 1, 2]))
        rows.append(runner.logits(runner.forward(pack([Extension(ids, 39, 40, (4, 3, 2))], 16))))
        assert (runner.pool.k.itemsize, runner.pool.dtype) == (1 if kept == "fp8" else 4, torch.float32)
    exact, found = rows
    assert 0 < (found - exact).std() < 0.3 * exact.std()


def test_on_a_gpu_auto_is_triton_and_the_cpu_kernels_are_refused(
    monkeypatch: pytest.MonkeyPatch, of_capability: Any
) -> None:
    chosen: list[tuple[str, bool]] = []

    def ops(backend: str, *, deterministic: bool = False, **_: Any) -> str:
        chosen.append((backend, deterministic))
        return backend

    monkeypatch.setattr(devices, "ops", ops)
    of_capability((8, 0))
    resolve_ops(EngineConfig(deterministic=True), CUDA)
    resolve_ops(EngineConfig(attention_backend="torch"), CUDA)
    assert chosen == [("triton", True), ("torch", False)]
    with pytest.raises(UnsupportedField, match="cannot read the memory of device cuda"):
        resolve_ops(EngineConfig(attention_backend="cpu"), CUDA)


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_the_dtype_is_one_that_the_gpu_multiplies(
    of_capability: Any, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    of_capability(capability)
    assert resolve_dtype(EngineConfig(), CUDA) == dtype
    assert resolve_dtype(EngineConfig(dtype="float32"), CUDA) == torch.float32


def test_a_dummy_model_runs_on_what_a_config_asks_for(tiny_model: Any) -> None:
    runner = build_runner(EngineConfig(num_pages=5, dtype="float32"), lambda *_: tiny_model)
    assert (runner.pool.num_pages, runner.device) == (5, CPU)
    assert runner.pool.k.shape[1] == 6, "one page more, for padding"


# --- memory ---------------------------------------------------------------------------------------


def test_pages_fill_what_the_fraction_leaves() -> None:
    memory = DeviceMemory(total=80 * GIB, used=20 * GIB, workspace=2 * GIB)
    pages = pages_left(memory, 0.9, 2 << 20)
    assert pages == (50 * GIB) // (2 << 20) - 1, "72 GiB, less 22, less the page for padding"
    for fraction in (0.3, 0.5, 0.77, 1.0):
        pages = pages_left(memory, fraction, 3_000_001)
        taken = memory.used + memory.workspace + (pages + 1) * 3_000_001
        assert taken <= fraction * memory.total < taken + 3_000_001, "as many as fit, and no more"


def test_a_model_that_does_not_fit_is_refused_with_the_figures() -> None:
    memory = DeviceMemory(total=16 * GIB, used=15 * GIB, workspace=GIB // 2)
    with pytest.raises(EngineError) as refused:
        pages_left(memory, 0.9, 1 << 20)
    message = refused.value.message
    for figure in ("15.00 GiB", "0.50 GiB", "0.9 of the device's 16.00 GiB", "14.40 GiB"):
        assert figure in message
    remedy = refused.value.remedy
    assert remedy is not None
    would_do = float(remedy.split("memory_fraction of ")[1].split()[0])
    assert pages_left(memory, would_do, 1 << 20) >= LEAST_PAGES, "the remedy is one"


def test_the_largest_steps_are_measured(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device's counters charge one byte for every token of a pass."""
    peak = [0]
    forward = Runner.forward

    def charged(self: Runner, batch: Any) -> torch.Tensor:
        peak[0] = batch.tokens.shape[1]
        return forward(self, batch)

    monkeypatch.setattr(Runner, "forward", charged)
    for name, value in {
        "memory_allocated": lambda device: 0,
        "max_memory_allocated": lambda device: peak[0],
        "reset_peak_memory_stats": lambda device: None,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (30, 100),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for chunk, prefill in ((100, 100), (4096, tiny_model.config.context_length)):
        config = EngineConfig(dtype="float32", chunk_tokens=chunk, max_running=24, page_size=16)
        memory = build.measured_memory(config, tiny_model, ops("cpu"), torch.float32, CPU)
        assert memory == DeviceMemory(total=100, used=70, workspace=prefill + 24)


@pytest.mark.parametrize(("what", "options"), [("The model's weights", {}), ("9 KV pages", {"num_pages": 9})])
def test_memory_that_runs_out_is_told_with_figures(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, what: str, options: dict[str, Any]
) -> None:
    def runs_out(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 4, 16 * GIB))
    if options:
        monkeypatch.setattr(build, "pool_for", runs_out)
    load = (lambda *_: tiny_model) if options else runs_out
    with pytest.raises(EngineError, match=rf"{what}.*of 16.00 GiB there were 0.25 GiB left"):
        build_runner(EngineConfig(device="cpu", dtype="float32", **options), load)


def test_where_no_fraction_would_do_none_is_advised() -> None:
    with pytest.raises(EngineError) as refused:
        pages_left(DeviceMemory(total=16 * GIB, used=16 * GIB, workspace=GIB), 0.9, 1 << 20)
    assert refused.value.remedy is not None
    assert "would do" not in refused.value.remedy


def test_pages_by_number_by_size_and_by_default(tiny_model: Any) -> None:
    shape = tiny_model.config
    size = page_bytes(shape, 16, torch.float32)

    def pages(device: torch.device, **options: Any) -> tuple[int, int, str] | None:
        return pages_in(EngineConfig(page_size=16, **options), shape, torch.float32, device)

    default = CPU_TOKENS // 16 + COW_PAGES
    assert pages(CPU) == (default, default, "context")
    given = GIB // 2 // size
    assert pages(CPU, kv_memory_gb=0.5) == pages(CUDA, kv_memory_gb=0.5) == (given, given, "option")
    assert pages(CUDA, num_pages=7, kv_memory_gb=3.0) == (7, 7, "option")
    assert pages(CUDA) is None, "what is left is measured"
    with pytest.raises(EngineError, match="holds 2 pages"):
        pages(CPU, num_pages=2)


def test_free_memory_bounds_the_pages_of_the_cpu_and_1_gib_is_kept(tiny_model: Any) -> None:
    """A context of 64k tokens, 64 KiB a token."""
    tiny = tiny_model.config
    shape = dataclasses.replace(
        tiny, context_length=1 << 16, head_dim=tiny.head_dim * (1 << 16) // page_bytes(tiny, 1, torch.float32)
    )
    assert page_bytes(shape, 16, torch.float32) == 1 << 20

    def budget(free_gib: float, **options: Any) -> tuple[int, int, str] | None:
        config = EngineConfig(page_size=16, **options)
        available = free_for_pages(16 * GIB, int(free_gib * GIB))
        return pages_in(config, shape, torch.float32, CPU, available=available)

    two_contexts = 2 * (1 << 16) // 16 + COW_PAGES
    assert budget(12) == (two_contexts, 1024, "context")
    assert budget(5.625) == (4121, 1024, "memory"), "a tenth of the machine, 1.6 GiB, is left free"
    assert budget(1) == budget(0) == (1024, 1024, "memory"), "as if 1 GiB were free"
    assert budget(1, kv_memory_gb=3) == (3072, 3072, "option")
    assert budget(12, tensor_parallel=2) == (1024, 1024, "memory"), "other ranks return no memory"


def test_the_room_is_told_with_its_bound_and_with_options_that_hold_more(tiny_model: Any) -> None:
    shape = dataclasses.replace(tiny_model.config, context_length=1 << 16)
    size = page_bytes(shape, 1, torch.float32)

    def room(tokens: int, bound: Any, device: str = "cpu", **options: Any) -> KvRoom:
        pages = tokens // 16 + COW_PAGES
        config = EngineConfig(page_size=16, **options)
        return room_of(config, shape, torch.float32, device, PageBudget(pages, min(pages, 1000), bound))

    all_of_it = room(2 << 16, "context")
    assert all_of_it.text.startswith("KV memory for 131,072 tokens, 2.0 contexts, as the context needs: ")
    assert (all_of_it.tokens, all_of_it.kept_tokens) == (131_072, 998 * 16)
    assert f"of which {998 * 16 * size / 2**30:.2f} GiB stay when unused" in all_of_it.text
    assert "whole context" not in all_of_it.text
    assert "context_length above 65,536" in all_of_it.remedy
    some = room(10_000, "memory")
    for said in (some.text, some.remedy):
        needed = re.search(r"the whole context needs kv_memory_gb ([\d.]+)", said)
        assert needed is not None
        found = pages_in(EngineConfig(page_size=16, kv_memory_gb=float(needed[1])), shape, torch.float32, CPU)
        assert found is not None
        assert found.pages >= (1 << 16) // 16 + COW_PAGES, "the remedy is one"
    assert "as kv_memory_gb 0.2 says" in room(10_000, "option", kv_memory_gb=0.2).text
    ratio = size / page_bytes(shape, 1, SimpleNamespace(itemsize=1, is_floating_point=True))  # type: ignore[arg-type]
    assert f"kv_cache_dtype fp8 holds {ratio:.1f} times as many" in room(10_000, "memory", "cuda").text
    assert "fp8" not in room(10_000, "memory", "cuda", kv_cache_dtype="fp8").text


@pytest.mark.parametrize("options", [{"kv_memory_gb": 1e6}, {"num_pages": 1 << 40}])
def test_more_pages_than_the_host_has_memory_are_refused_by_name(
    options: dict[str, Any], tiny_model: Any
) -> None:
    (name,) = options
    with pytest.raises(EngineError, match=rf"^{name} is .* GiB are free") as refused:
        build_runner(EngineConfig(device="cpu", dtype="float32", **options), lambda *_: tiny_model)
    assert name in (refused.value.remedy or "")


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="memory_fraction"):
        EngineConfig(memory_fraction=fraction)


# --- the ladder of batch sizes ----------------------------------------------------------------------


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 100, 128, 250, 511, 1024])
def test_a_ladder_reaches_its_end_and_pads_by_a_third_or_by_its_steps(largest: int) -> None:
    sizes = ladder(largest)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, largest)
    assert len(sizes) <= 8 + min(largest, 256) // 8 + max(largest - 256, 0) // 16
    for count in range(1, largest + 1):
        size = next(size for size in sizes if size >= count)
        assert 3 * (size - count) <= size, (count, size)
        assert size - count < (8 if count <= 256 else 16), (count, size)


# --- numbers of requests and tokens -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("gib", "numbers"),
    [(None, (128, 512, 16)), (23.6, (256, 2048, 64)), (47, (512, 8192, 64)), (79, (1024, 8192, 64))],
)
def test_a_step_takes_what_the_device_can_in_pages_for_it(
    gib: float | None, numbers: tuple[int, int, int]
) -> None:
    memory = None if gib is None else int(gib * GIB)
    config = with_defaults(EngineConfig(), memory)
    assert (config.max_running, config.chunk_tokens, config.page_size) == numbers
    given = with_defaults(EngineConfig(max_running=7, page_size=8), memory)
    assert (given.max_running, given.chunk_tokens, given.page_size) == (7, numbers[1], 8)
    assert with_defaults(given, None) == given
    assert EngineConfig(replicas=2).most_requests(numbers[0]) == 2 * numbers[0] + config.max_waiting


def test_the_memory_is_that_of_the_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB)
    )
    assert with_defaults_of(EngineConfig(), CUDA).max_running == 1024
    assert with_defaults_of(EngineConfig(), CPU).max_running == 128


@pytest.mark.parametrize(
    ("capability", "exact", "rounds"),
    [((8, 9), False, True), ((12, 0), False, True), ((9, 0), True, False), ((8, 6), False, False)],
)
def test_activations_become_float8_where_the_device_multiplies_it(
    capability: tuple[int, int],
    exact: bool,
    rounds: bool,
    monkeypatch: pytest.MonkeyPatch,
    of_capability: Any,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(devices, "ops", lambda *_, **options: asked.append(options["float8"]))
    of_capability(capability)
    devices.triton_ops(EngineConfig(exact_activations=exact), CUDA)
    assert asked == [rounds]


@pytest.mark.parametrize(
    ("trial", "capability", "options", "said"),
    [
        ("fused-rounding", (8, 6), {}, "activations are not rounded"),
        ("fused-rounding", (9, 0), {"exact_activations": True}, "activations are not rounded"),
        ("fused-rounding", (9, 0), {"quantization": "none"}, "activations are not rounded"),
        ("fused-rounding", (9, 0), {"dtype": "float32"}, "activations are not rounded"),
        ("dependent-launch", (8, 9), {}, "capability 9.0"),
        ("skinny-products", (9, 0), {"deterministic": True}, "deterministic is set"),
        ("chunked-delta", (9, 0), {"deterministic": True}, "deterministic is set"),
        ("library-prompts", (9, 0), {"deterministic": True}, "deterministic is set"),
        ("skinny-products", (9, 0), {"attention_backend": "torch"}, "the attention backend is 'torch'"),
    ],
)
def test_a_trial_without_effect_is_refused(
    trial: Any, capability: tuple[int, int], options: Any, said: str, of_capability: Any
) -> None:
    of_capability(capability)
    with pytest.raises(UnsupportedField, match=said):
        devices.resolve_ops(EngineConfig(trial=(trial,), **options), CUDA)


def test_the_trials_of_the_configuration_reach_the_kernels(
    monkeypatch: pytest.MonkeyPatch, of_capability: Any
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(devices, "ops", lambda *_, **options: asked.append(options["trials"]))
    of_capability((9, 0))
    devices.resolve_ops(EngineConfig(trial=["dependent-launch", "dependent-launch"]), CUDA)  # type: ignore[list-item]
    assert asked == [("dependent-launch",)]
    with pytest.raises(ValueError, match=r"trial is 'skinny'; it must be one of .* skinny-products"):
        EngineConfig(trial="skinny")


def mixed(float8: bool) -> Quantised:
    """Two layouts of weights; the second has its activations in float8 if `float8`."""
    layouts = [Quantised("compressed-tensors", (32,)), Quantised("compressed-tensors", (), (), float8)]
    groups = tuple(((f"re:{index}",), layout) for index, layout in enumerate(layouts))
    return dataclasses.replace(layouts[0], config_groups=groups)


@pytest.mark.parametrize(
    ("trial", "changes"),
    [
        ("chunked-delta", {"states": None}),
        ("library-prompts", {"head_dim": 256}),
        ("fused-rounding", {"quantised": None}),
        ("fused-rounding", {"quantised": Quantised("gptq", groups=(128,))}),
        ("fused-rounding", {"quantised": mixed(float8=False)}),
    ],
)
def test_a_trial_that_a_model_has_no_use_for_is_refused(trial: Any, changes: Any, of_capability: Any) -> None:
    of_capability((9, 0))
    shape = SimpleNamespace(
        states=object(), head_dim=128, attention_soft_cap=0.0, sinks=(), quantised=mixed(float8=True)
    )
    config = EngineConfig(trial=trial)
    devices.check_trials(config, CUDA, shape)  # type: ignore[arg-type]
    vars(shape).update(changes)
    with pytest.raises(UnsupportedField, match=f"trial is '{trial}'"):
        devices.check_trials(config, CUDA, shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_the_bytes_of_a_page_are_the_keys_of_all_layers_then_the_values(
    tiny_model: Any, dtype: torch.dtype
) -> None:
    pool = KvPool(tiny_model.config, num_pages=4, page_size=2, dtype=torch.float32, page_dtype=dtype)
    for each in (pool.k, pool.v):
        each.copy_(10 * torch.randn(each.shape))
    read = pool.read_pages([3, 1])
    assert (read.shape, read.dtype) == ((2, pool.page_bytes), torch.uint8)
    for row, page in zip(read, (3, 1), strict=True):
        keys, values = (each[:, page].contiguous().view(torch.uint8).flatten() for each in (pool.k, pool.v))
        assert torch.equal(row, torch.cat((keys, values)))
    pool.write_pages([0, 2], read)
    assert torch.equal(pool.read_pages([0, 2]), read)
    assert torch.equal(pool.k[:, 2].float(), pool.k[:, 1].float())
