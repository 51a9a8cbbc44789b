"""The Triton kernels that calls A and B launch, compiled without a GPU, so that the kit can carry them.

    TRITON_CACHE_DIR=FOLDER python -m benchmarks.gpu_visit.forms 9.0 MODEL

The forms of engines are those of the engines' warm-ups. The forms of the parts twins and kernels are those of
every case, on tensors without data. A form that is missed here is compiled on the GPU's host. The shape and
the tokenizer that the part serve reads are written into the folder MODEL.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_visit.model import SHAPE, write_model
from benchmarks.gpu_visit.parts import twins
from ramify.kernels.triton import ahead
from ramify.runtime.config import EngineConfig
from ramify.runtime.cores import usable_cores
from ramify.runtime.executor.triton_forms import compile_for_absent_gpu
from ramify.runtime.model.checkpoint import ModelFiles
from tests.gpu import toy
from tests.kernels.kernel_cases.base import cases

ENGINES: tuple[tuple[dict[str, Any], tuple[dict[str, Any], ...]], ...] = (
    (json.loads(SHAPE.read_text()), ({}, {"deterministic": True})),
    (toy.SHAPE, tuple({"deterministic": True, "page_size": size} for size in (16, 64))),
)
"""(shape, options of each engine with this shape)."""


def compile_engines(capability: int) -> Iterator[str]:
    for shape, variants in ENGINES:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(shape))
            files = ModelFiles("shape", Path(folder), Path(folder))
            for options in variants:
                done = compile_for_absent_gpu(EngineConfig(load_format="dummy", **options), files, capability)
                took = f"{done.compiled} compiled and {done.failed} failed in {done.seconds:.0f} s"
                yield f"engine {options}: {done.forms} forms, {took}"


def note_cases(capability: int) -> dict[ahead.Form, None]:
    """The forms that the parts twins and kernels launch. Nothing is compiled."""
    meta = torch.device("meta")
    with ahead.absent(capability), ahead.noting() as forms, torch.inference_mode():
        for case in (*cases(), *twins.weights(meta)):
            with contextlib.suppress(Exception):  # some inputs are made of numbers: there are none
                case.build(meta).run()
    return forms


def compile_cases(capability: int) -> Iterator[str]:
    forms = note_cases(capability)
    with ahead.absent(capability):
        lacking = ahead.missing(forms)
    failures = ahead.compile_forms(lacking, capability, processes=len(usable_cores()))
    yield f"cases: {len(forms)} forms, {len(lacking)} compiled"
    yield from failures


def main() -> int:
    capability = int(sys.argv[1].replace(".", ""))
    write_model(Path(sys.argv[2]))
    for line in (*compile_engines(capability), *compile_cases(capability)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
