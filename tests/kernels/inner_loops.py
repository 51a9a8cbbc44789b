"""Machine code of the inner loops of CPU kernels for a processor that is not here. Nothing is run.

    python -m tests.kernels.inner_loops float|bytes TRIPLE PROCESSOR FEATURES

prints JSON: the lanes of a vector, the formats that are multiplied as bytes, and the assembly of each loop.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


class Told(NamedTuple):
    lanes: int
    forms: list[str]
    code: dict[str, str]


def loops_for(kind: str, triple: str, processor: str, features: str) -> Told:
    """The loops in float32 (`float`) or in int8 and int16 (`bytes`), made by a process of its own."""
    environment = {**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-m", __name__, kind, triple, processor, features]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert result.returncode == 0, result.stderr
    return Told(*json.loads(result.stdout))


def main(kind: str, triple: str, processor: str, features: str) -> None:
    from ramify.kernels.cpu.codegen import functions

    made: list[tuple[str, int, Callable[..., None]]] = []

    def recorded(name: str, arguments: int, fill: Callable[..., None]) -> None:
        made.append((name, arguments, fill))

    functions.llvm_function = recorded
    from ramify.kernels.cpu.codegen.simd import LANES
    from ramify.kernels.cpu.packed_linear import byte_dots, int8, tiles

    if kind == "float":
        from ramify.kernels.cpu import attention_loops as attention_loops

        made = [each for each in made if "_tiles_" not in each[0] and "_int" not in each[0]]  # AMX, bytes
        for form in tiles.FORMS:
            tiles.products(form, False)
        made = [each for each in made if "_dots" not in each[0] and "_pairs" not in each[0]]  # AVX512_BF16
    else:
        made = [each for each in made if "_round_" in each[0]]
        for form in (*byte_dots.FORMS, "table") if byte_dots.INSTRUCTION else ():
            int8.products(form)
        if byte_dots.INT16_X:
            int8.products("int8", int16_x=True)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, features=features, opt=3)
    native = triple.startswith(llvm.get_default_triple().split("-")[0])
    code = {name: assembled(machine, triple, native, name, *rest) for name, *rest in made}
    print(json.dumps((LANES, byte_dots.FORMS, code)))


def assembled(
    machine: Any, triple: str, native: bool, name: str, arguments: int, fill: Callable[..., None]
) -> str:
    module = ir.Module()
    module.triple = triple
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * arguments)
    function = ir.Function(module, kind, name)
    body = ir.IRBuilder(function.append_basic_block())
    fill(body, *function.args)
    body.ret_void()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    if native:
        machine.emit_object(parsed)  # parses inline assembly
    return str(machine.emit_assembly(parsed))


if __name__ == "__main__":
    main(*sys.argv[1:])
