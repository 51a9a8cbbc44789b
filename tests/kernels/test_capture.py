"""Operations that a CUDA graph forbids, looked for in captured steps: none makes or reads data on the host.

A replay would read memory of the host that is long another's.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ramify.kernels.machine import transfers
from ramify.kernels.machine.transfers import to_device
from ramify.kernels.weights.lora import LoraRows
from ramify.runtime.executor import attention, build
from ramify.runtime.executor.attention import PlannedAttention
from ramify.runtime.executor.decode_graphs import LIBRARY_BYTES, DecodeGraphs, bytes_beside
from ramify.runtime.executor.kv_pool import StatePool
from ramify.runtime.executor.token_graphs import TokenGraphs
from ramify.runtime.model.shape.config import StateShape
from tests.kernels.graph_cases import forms_of, graphs_of, replays, runner_of
from tests.kernels.kernel_cases.base import Case, cases
from tests.kernels.kernel_compiler import compiling

CPU = torch.device("cpu")
FORBIDDEN = {"lift_fresh", "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "_pin_memory"}


class Recorder(TorchDispatchMode):
    """Notes operations that make a tensor from the host's numbers, or numbers from a tensor.

    On the CPU `to_device` of a tensor is no operation, so that its calls are noted themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.operations = 0
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Any:
        moves = transfers.to_device

        def noted(*args: Any) -> torch.Tensor:
            self.found.append("to_device")
            return moves(*args)

        for module in list(sys.modules.values()):
            if vars(module).get("to_device") is moves:
                self._patches.enter_context(mock.patch.object(module, "to_device", noted))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        name = func.overloadpacket.__name__
        if name in FORBIDDEN:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def check_replays(graphs: DecodeGraphs | TokenGraphs) -> None:
    """A replay of each captured step makes nothing on the host, and reads nothing back."""
    steps = replays(graphs)
    for _ in forms_of(graphs):
        with Recorder() as recorder:
            next(steps)
        assert not recorder.found
        assert recorder.operations


def test_the_recorder_sees_what_is_made_on_the_host() -> None:
    with Recorder() as recorder:
        torch.tensor([1, 2])
        torch.zeros(2).nonzero()
        to_device(torch.zeros(2), CPU)
        attention.to_device(torch.zeros(2), CPU)
    assert recorder.found == ["lift_fresh", "nonzero", "to_device", "to_device"]
    to_device(torch.zeros(2), CPU)
    assert len(recorder.found) == 4


def test_steps_of_adapters_and_states_send_from_pinned_memory() -> None:
    """A copy from pageable memory waits for all that the device has been given."""
    rows = LoraRows(np.array([1, -1, 0, 1]))
    shape = StateShape(layers=1, channels=4, width=4, heads=1, key_dim=2, value_dim=2)
    states = StatePool(shape, num_slots=4)
    with Recorder() as recorder:
        rows.on(CPU)
        states.copy([(0, 1), (1, 2)])
    assert recorder.found.count("to_device") == 4


@pytest.mark.parametrize("case", list(cases(tiny=True)), ids=lambda case: case.name)
def test_a_benchmark_s_kernel_can_be_replayed(case: Case) -> None:
    with compiling(90, noting=True) as launches:
        work = case.build(CPU)
        launches.clear()
        with Recorder() as recorder:
            work.run()
    assert not recorder.found
    assert launches


def test_a_captured_step_can_be_replayed() -> None:
    with compiling(90, noting=True), torch.inference_mode():
        runner = runner_of()
        runner.capture_graphs([1, 4], max_pages=250)
        check_replays(graphs_of(runner))


def test_graphs_take_no_more_memory_than_was_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is set aside before the number of pages is known."""
    with compiling(90, noting=True):
        runner = runner_of()
        assert isinstance(runner.attention, PlannedAttention)
        runner.capture_graphs([1, 2, 4], max_pages=256)
        graphs = graphs_of(runner)
        space, kept = graphs.buffers.space, graphs.sizes[-1] * 128
        assert space is not None
        free = bytes_beside(runner.attention, [1, 2, 4], 1200 * 16, 4 * 128)
        assert space.nbytes > 1 << 18
        assert space.nbytes + kept + LIBRARY_BYTES <= free
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 30))
        config = build.EngineConfig(max_running=4, chunk_tokens=512)
        eager = build._unmeasured(config, runner, 128, CPU, False)
        assert eager == runner.attention.most_state_bytes() > 0
        assert build._unmeasured(config, runner, 128, CPU, True) >= eager + space.nbytes + kept
