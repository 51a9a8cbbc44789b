"""Triton kernels compiled ahead: noted, compiled in other processes, found in the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ramify.errors import UnsupportedField
from ramify.kernels.triton import ahead, norm
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.triton_forms import compile_for_absent
from ramify.runtime.model.hub.resolve import ModelFiles
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


def test_a_compiling_process_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with ahead.absent(90), ahead.noting() as forms:
        launch_norms(4096)
    failures = ahead.compile_forms(list(forms), 90, processes=1)
    assert len(failures) == 2
    assert all("status 1" in failure for failure in failures)


@pytest.mark.parametrize(
    ("options", "more"),
    [({}, set()), ({"deterministic": True}, {"_product"}), ({"dtype": "float32"}, set())],
    ids=str,
)
def test_every_form_of_a_warm_up_is_compiled(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], more: set[str]
) -> None:
    asked: list[ahead.Form] = []

    def compile_forms(forms: list[ahead.Form], capability: int, *, processes: int) -> list[str]:
        assert capability == 90
        asked.extend(forms)
        return []

    monkeypatch.setattr(ahead, "compile_forms", compile_forms)
    config = EngineConfig(load_format="dummy", **options)  # type: ignore[arg-type]
    done = compile_for_absent(config, files, 90)
    assert done.forms == done.compiled == len(asked)
    names = {form.kernel for form in asked}
    assert {
        "attend",
        "_merge",
        "_rope_store",
        "_copy",
        "_sample",
        "collect",
        "_finish",
        "_edit",
    } | more <= names


def test_models_that_run_through_transformers_are_refused(files: ModelFiles) -> None:
    with pytest.raises(UnsupportedField, match="through transformers"):
        compile_for_absent(EngineConfig(load_format="dummy", model_impl="transformers"), files, 90)


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
    assert ": 0 compiled" not in lines[0]
    assert ": 0 compiled" in lines[1]
