"""The parts of a visit to a GPU on tiny shapes, in Triton's interpreter, in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_visit.figures import Figures
from benchmarks.gpu_visit.model import write_model
from benchmarks.gpu_visit.parts import profile, versions
from benchmarks.gpu_visit.parts.serve import facts_in
from benchmarks.jit import files_on_disk

pytestmark = pytest.mark.slow

RUN = """
import importlib, sys
from pathlib import Path
from benchmarks.gpu_visit.figures import Figures

for name in sys.argv[2:]:
    part = importlib.import_module(f"benchmarks.gpu_visit.parts.{name}")
    figures = Figures(Path(sys.argv[1]), name, tiny=True)
    with figures.attempt("the part itself"):
        part.run(figures)
"""
SPOILT = """
import sys
from pathlib import Path
from benchmarks.gpu_visit.figures import Figures
from benchmarks.gpu_visit.parts import twins
from ramify.kernels.triton import activation, kv_store, norm, sampling

right = norm.rms_norm, activation.silu_mul, sampling.sample_tokens
norm.rms_norm = lambda x, *given, out: right[0](x * x, *given, out=out)
activation.silu_mul = lambda x, *, out: (right[1](x[:3], out=out[:3]), out)[1]
kv_store.copy_listed = lambda *given: 1 / 0
sampling.sample_tokens = lambda *given: right[2](*given).clamp(max=1)
figures = Figures(Path(sys.argv[1]), "twins", tiny=True)
twins.run(figures)
"""
CASES = {
    "twins": ["decode 1 x 4k", "cascade 64 over 8k", "prefill 8k, deterministic", "float8 product"],
    "toy": ["share 0/1"],
    "engine": ["decode 1 x 20", "decode 2 x 20", "prefill 24", "cascade, 2 over 128", "engine: measured"],
    "profile": ["decode 1 x 20", "decode 2 x 20", "prefill 24"],
    "library": ["decode 1 x 20", "decode 2 x 20", "prefill 24"],
    "kernels": ["decode 64 x 4k", "all cases"],
    "long": ["decode 2 x 40", "decode 1 x 80", "deterministic decode 1 x 8"],
    "trials": [
        "fused-rounding: gate + down, 2 rows, a factor a row",
        "skinny-products: qkv, 2 rows",
        "chunked-delta: a prompt of 40",
        "skinny-products: decode 1 x 20",
        "library-prompts: prefill 24",
    ],
    "serve": ["ready", "4 requests", "end"],
}


Rows = Mapping[str, Sequence[Mapping[str, Any]]]


def rows_of(script: str, file: Path, *arguments: str) -> Rows:
    """The figures of a process, by case."""
    own = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, str(file), *arguments]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    found = defaultdict(list)
    for line in file.read_text().splitlines():
        row = json.loads(line)
        found[f"{row['part']}: {row['case']}"].append(row)
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_part_has_its_figures(tmp_path: Path) -> None:
    rows = rows_of(RUN, tmp_path / "figures.jsonl", *CASES)
    failed = [row for some in rows.values() for row in some if "error" in row]
    assert not failed
    missing = [
        name for part, cases in CASES.items() for case in cases if (name := f"{part}: {case}") not in rows
    ]
    assert not missing
    assert rows["toy: share 0/1"][-1]["so_far"]["passed"] == 1
    assert rows["twins: draw 3, masked"][0]["error_rel"] == 0
    assert 0 < rows["twins: silu * up 6 x 96"][0]["error_rel"] < 1e-2
    for name in ("engine: decode 1 x 20", "long: decode 1 x 80"):
        row = rows[name][0]
        assert 0 < row["floor_s"] < row["seconds"]
        assert row["spread"] >= 0
    assert rows["engine: without cascade, 2 over 128"][0]["ratio"] > 0
    assert rows["library: decode 2 x 20"][0]["ratio"] > 0
    assert rows["profile: decode 1 x 20"][0]["host_s"] > 0
    assert any(name.startswith("profile: decode 1 x 20: aten::") for name in rows)
    assert rows["serve: 4 requests"][0]["valid_share"] == 1
    assert rows["serve: end"][0]["status"] == 0


def test_a_wrong_kernel_fails_its_case_alone(tmp_path: Path) -> None:
    """One computes other numbers, one leaves rows unwritten, one raises, and one draws other tokens."""
    rows = rows_of(SPOILT, tmp_path / "figures.jsonl")
    errors = {case: row["error"] for case, some in rows.items() for row in some if "error" in row}
    for case, said in (
        ("norm 6 x 64", "agrees with none"),
        ("silu * up 6 x 96", "288 of 576 numbers of the output are NaN or were not written"),
        ("copy pages, 32 layers", "ZeroDivisionError"),
        ("greedy 3", "agrees with none"),
        ("draw 2, masked", "agrees with none"),
    ):
        assert said in errors.pop(f"twins: {case}")
    assert all(name.startswith(("twins: draw", "twins: greedy")) for name in errors)
    assert rows["twins: float8 product"][0]["error_rel"] < 1e-2


def test_the_log_of_a_server_tells_of_its_start() -> None:
    log = (
        "2026-01-01 scheduler INFO cuda:0: DeviceMemory(total=1), 21870 pages, 0 states\n"
        "2026-01-01 scheduler INFO cuda:0: 309 CUDA graphs in 12.5 s\n"
    )
    assert facts_in(log) == {"pages": 21870, "graphs": 309, "capture_s": 12.5}
    assert facts_in("") == {}


def test_files_of_triton_s_cache_are_counted(tmp_path: Path) -> None:
    for name in ("AB/kernel.cubin", "AB/kernel.json", "CD/other.cubin", "EF/cuda_utils.cpython-312.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert files_on_disk(tmp_path) == {"kernels": 2, "modules": 1}


def test_a_host_s_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions.tools().keys() == {"cc", "Python.h"}
    assert versions.tools()["cc"] is None
    (tmp_path / "clang").touch(0o755)
    assert versions.tools()["cc"] == str(tmp_path / "clang")


def test_a_profiled_prefill_counts_its_own_seconds(tmp_path: Path) -> None:
    """The function's own seconds, not those around it."""
    figures = Figures(tmp_path / "figures.jsonl", "profile", tiny=True)

    def run() -> float:
        torch.zeros(8).add_(1)
        return 10.0

    profile.record(figures, "prefill", run, 2, torch.device("cpu"))
    row = json.loads(figures.path.read_text().splitlines()[0])
    assert (row["seconds"], row["profiled_s"], row["host_s"]) == (5.0, 5.0, 5.0)


@pytest.mark.weights
def test_a_model_s_folder_has_a_shape_and_a_tokenizer(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 128256
    assert {path.name for path in folder.iterdir()} >= {"tokenizer.json", "chat_template.jinja"}
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8 << 20
