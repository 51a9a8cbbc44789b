"""Triton kernels compiled ahead: noted, compiled in other processes, found in the cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton.backends.nvidia import driver as nvidia

from ramify.cli.pull import FORM_OPTIONS
from ramify.errors import UnsupportedField
from ramify.kernels.triton import ahead, norm
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.triton_forms import compile_for_absent_gpu
from ramify.runtime.model.checkpoint import ModelFiles
from tests.kernels.test_triton_warm_up import SHAPE
from tests.runtime.tiny import write_tiny

pytestmark = pytest.mark.slow

META = torch.device("meta")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    """A model's shape, without weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SHAPE, "architectures": ["Qwen3ForCausalLM"]}))
    return ModelFiles("tiny", folder, folder)


def test_what_is_built_without_a_driver_depends_on_the_drivers_library(tmp_path: Path) -> None:
    built = tmp_path / "launcher.so"
    code = "int cuCtxGetCurrent(void *); int launch(void) { return cuCtxGetCurrent(0); }"
    with ahead.driver_library():
        folders = [f"-L{folder}" for folder in nvidia.libcuda_dirs()]
        command = ["cc", "-shared", "-fPIC", "-Wl,--as-needed", "-o", str(built), "-x", "c", "-"]
        subprocess.run([*command, *folders, "-l:libcuda.so.1"], input=code, text=True, check=True)
    assert b"libcuda.so.1" in built.read_bytes()


def launch_norms(size: int = 576) -> None:
    x, weight = torch.empty(4, size, device=META), torch.empty(size, device=META)
    norm.rms_norm(x, weight, 1e-5)
    norm.rms_norm(x, weight, 1e-5)
    norm.add_rms_norm(x, x, weight, 1e-5)


def test_forms_are_compiled_in_other_processes_and_found() -> None:
    with ahead.absent(90):
        with ahead.noting() as forms:
            launch_norms()
        assert [form.kernel for form in forms] == ["_rms_norm", "_add_rms_norm"]
        assert ahead.missing(forms) == list(forms)
        broken = ahead.Form("ramify.kernels.triton.norm", "_rms_norm", "{}")
        (failure,) = ahead.compile_forms([*forms, broken], 90, processes=1)
        assert failure.startswith("_rms_norm: KeyError")
        assert ahead.missing(forms) == []
        with ahead.noting() as others:
            launch_norms()
            launch_norms(1024)
        assert {json.loads(form.specialisation)["name"] for form in others} <= {
            "ramify.kernels.triton.norm._rms_norm",
            "ramify.kernels.triton.norm._add_rms_norm",
        }
        assert len(others) == 2, "those of the other size: the first are ready in this process"


def test_every_function_has_its_cache_key_before_the_first_is_compiled() -> None:
    """A process of its own looks: functions compiled in this one have keys already."""
    code = "from ramify.kernels.triton import ahead; ahead.fix_cache_keys(); import gc; "
    code += "found = [each for each in gc.get_objects() if isinstance(each, ahead.JITFunction)]; "
    code += "ours = [each for each in found if each.fn.__module__.startswith('ramify.')]; "
    code += "print(len(ours), sum(each.hash is None for each in ours))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    functions, without = map(int, done.stdout.split())
    assert functions > 50
    assert without == 0


def test_a_compiling_process_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with ahead.absent(90), ahead.noting() as forms:
        launch_norms(4096)
    failures = ahead.compile_forms(list(forms), 90, processes=1)
    assert len(failures) == 2
    assert all("status 1" in failure for failure in failures)


def test_an_interrupt_ends_the_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that compiles is killed, and the waiting forms get none."""
    workers: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def started(command: list[str], **options: object) -> subprocess.Popen[str]:
        never = [sys.executable, "-c", "import sys; sys.stdin.read()"]  # answers nothing
        workers.append(start(never, **options))  # type: ignore[call-overload]
        os.kill(os.getpid(), signal.SIGINT)
        return workers[-1]

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(KeyboardInterrupt):
        ahead.compile_forms([ahead.Form("module", "kernel", "{}")] * 3, 90, processes=1)
    assert [worker.wait(timeout=60) for worker in workers] == [-signal.SIGKILL]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ahead.Form]:
    """The forms that are to be compiled; none is."""
    found: list[ahead.Form] = []

    def compile_forms(forms: list[ahead.Form], capability: int, *, processes: int) -> list[str]:
        found.extend(forms)
        return []

    monkeypatch.setattr(ahead, "compile_forms", compile_forms)
    return found


def test_every_form_of_a_warm_up_is_compiled(files: ModelFiles, asked: list[ahead.Form]) -> None:
    done = compile_for_absent_gpu(EngineConfig(load_format="dummy"), files, 90)
    assert done[:3] == (len(asked), len(asked), 0)
    names = {form.kernel for form in asked}
    assert {"attend", "_merge", "_rope_store", "_copy", "_sample", "collect", "_finish"} <= names


OTHERS: dict[str, object] = {
    "dtype": "float32",
    "quantization": "int8",
    "deterministic": True,
    "trial": ("dependent-launch",),
    "cascade": False,
    "page_size": 16,
    "kv_cache_dtype": "fp8",
    "tensor_parallel": 2,
}
"""Values of options of `ramify pull` that are not the default."""


def test_the_other_options_need_models_of_their_own() -> None:
    """Float8 activations are those of FP8 checkpoints; random weights are for shapes without files."""
    assert set(FORM_OPTIONS) - set(OTHERS) == {"exact_activations", "load_format"}


@pytest.fixture(scope="module")
def with_weights(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = write_tiny(tmp_path_factory.mktemp("models") / "tiny")
    return ModelFiles("tiny", folder, folder)


@pytest.mark.parametrize("option", OTHERS)
def test_each_option_changes_the_forms(
    option: str, with_weights: ModelFiles, asked: list[ahead.Form]
) -> None:
    compile_for_absent_gpu(EngineConfig(), with_weights, 90)
    default = set(asked)
    asked.clear()
    config = EngineConfig(**{option: OTHERS[option]})  # type: ignore[arg-type]
    compile_for_absent_gpu(config, with_weights, 90)
    assert set(asked) != default


def test_pages_that_the_gpu_cannot_read_are_refused(files: ModelFiles) -> None:
    with pytest.raises(UnsupportedField, match=r"compute capability is below 8\.9"):
        compile_for_absent_gpu(EngineConfig(load_format="dummy", kv_cache_dtype="fp8"), files, 80)


def test_models_that_run_through_transformers_are_refused(files: ModelFiles) -> None:
    with pytest.raises(UnsupportedField, match="through transformers"):
        compile_for_absent_gpu(EngineConfig(load_format="dummy", model_impl="transformers"), files, 90)


@pytest.mark.long
def test_a_start_with_a_carried_cache_compiles_nothing(tmp_path: Path) -> None:
    """Each `ramify pull` is a process of its own. The second one finds what the first has compiled."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "carried")}
    command = [
        sys.executable,
        "-m",
        "ramify",
        "pull",
        str(write_tiny(tmp_path / "tiny")),
        "--capability",
        "9.0",
    ]
    lines = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
        for _ in range(2)
    ]
    assert ": 0 were in" in lines[0]
    assert " 0 were compiled" in lines[1]
