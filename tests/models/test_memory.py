"""Bytes that models need, and bytes that are free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.memory import CPU_BYTES
from ramify.runtime.host_memory import HostMemory
from ramify.runtime.inspect.machine import Machine
from ramify.runtime.inspect.report import WORKSPACE
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.models import memory
from tests.runtime.tiny import write_model, write_tokenizer

MACHINE = Machine("cpu", "the CPU", 8 << 30, "bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tokenizer(folder)
    write_model(folder, context_length=512)
    return folder


def test_the_need_of_a_model(folder: Path) -> None:
    files = ModelFiles("tiny", folder, folder)
    need = memory.need_of_files(EngineConfig(dtype="float32", num_pages=66, page_size=16), files, MACHINE)
    assert need.kv == 64 * 16 * 2 * 2 * 2 * 64 * 4  # tokens, layers, heads, keys and values, width, bytes
    assert need.context_length == 512
    parameters = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0.5 * parameters < need.weights < 1.1 * parameters
    assert need.total == need.weights + need.kv + WORKSPACE
    default = memory.need_of_files(EngineConfig(), files, MACHINE)
    assert 0 < default.kv <= CPU_BYTES
    assert memory.need_of_files(EngineConfig(kv_memory_gb=2), files, MACHINE).kv > 1.9 * CPU_BYTES


def test_the_need_on_a_cuda_device_is_within_its_share(folder: Path) -> None:
    files, card = ModelFiles("tiny", folder, folder), Machine("cuda", "a card", 80 << 30, "bfloat16")
    config = EngineConfig(memory_fraction=0.5)
    assert memory.need_of_files(config, files, card).total <= 40 << 30


def test_files_that_cannot_be_read_count_by_their_size(tmp_path: Path) -> None:
    weights = tmp_path / "broken.gguf"
    weights.write_bytes(bytes(1000))
    need = memory.need_of_files(EngineConfig(), ModelFiles("x", weights, tmp_path), MACHINE)
    assert (need.weights, need.kv, need.context_length) == (1000, CPU_BYTES, None)


def test_free_memory_is_what_is_available_less_what_loaded_models_may_still_touch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "this_machine", lambda device: MACHINE)
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(9000, 0, 6000))
    monkeypatch.setattr(memory, "_resident", {1: 300, 2: 400}.__getitem__)
    monkeypatch.setattr(memory, "with_children", list)
    free = memory.free_memory(EngineConfig())
    assert free(0, []) == 6000
    assert free(5000, [1, 2]) == 6000 + 700 - 5000


def test_a_cuda_devices_share_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Machine("cuda", "a card", 1000, "bfloat16")
    monkeypatch.setattr(memory, "this_machine", lambda device: card)
    assert memory.free_memory(EngineConfig())(300, [1]) == 600
    assert memory.free_memory(EngineConfig(memory_fraction=0.5))(300, [1]) == 200


def test_processes_are_measured_with_their_children() -> None:
    nested = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0); "
    with subprocess.Popen(
        [sys.executable, "-c", nested + "print(p.pid, flush=True); p.wait()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert memory.with_children([process.pid]) == [process.pid, child]
        both, one = (memory.proportional_size([pid]) for pid in (process.pid, child))
        assert both > one > 0
        assert process.stdin is not None
        process.stdin.close()
    assert memory.with_children([process.pid]) == [process.pid]
    assert memory.proportional_size([process.pid]) == 0


def test_the_need_of_a_native_model_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom ramify.runtime.config import EngineConfig\n"
        "from ramify.runtime.models.memory import need_of\n"
        f"print(need_of(EngineConfig(model={str(folder)!r}, device='cpu'), False).weights > 0)\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "False"]
