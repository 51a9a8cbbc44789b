"""Products of bytes as code for processors that are not here: their instruction, and no call of a library.

Nothing is run: results are tested where an instruction is (`test_linear_int8`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

CODE = """
import json, sys
import llvmlite.binding as llvm
from llvmlite import ir

from ramify.kernels.cpu.codegen import functions

made = []
functions.llvm_function = lambda name, arguments, fill: made.append((name, arguments, fill))
from ramify.kernels.cpu.packed_linear import byte_dots, int8

for form in (*byte_dots.FORMS, "table") if byte_dots.INSTRUCTION else ():
    int8.products(form)
if byte_dots.INT16_X:
    int8.products("int8", int16_x=True)
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
llvm.initialize_native_asmparser()
native = llvm.get_default_triple().split("-")[0]
triple, processor, features = sys.argv[1:]
target = llvm.Target.from_triple(triple)
machine = target.create_target_machine(cpu=processor, features=features, opt=3)
found = {}
for name, arguments, fill in made:
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
    if triple.startswith(native):
        machine.emit_object(parsed)  # parses inline assembly
    found[name] = machine.emit_assembly(parsed)
print(json.dumps({"forms": byte_dots.FORMS, "code": found}))
"""
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
AVX2 = "+avx,+avx2,+fma,+f16c,+ssse3,+sse2"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq"
PROCESSORS = {
    "apple-m1": (ARM, "+neon,+fp-armv8,+fullfp16,+dotprod", r"\bsdot\s+v\d+\.4s", ["int8", "int4"]),
    "haswell": (X86, AVX2, r"\bvpmaddubsw\s.*%ymm", ["int4"]),
    "alderlake": (X86, f"{AVX2},+avxvnni", r"\bvpdpbusd\s.*%ymm", ["int8", "int4"]),
    "skylake-avx512": (X86, AVX512, "", []),
    "cascadelake": (X86, f"{AVX512},+avx512vnni", r"\bvpdpbusd\s.*%zmm", ["int8", "int4"]),
}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", PROCESSORS)
def test_products_have_the_processors_instruction(name: str) -> None:
    triple, features, instruction, forms = PROCESSORS[name]
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-c", CODE, triple, name, features]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["forms"] == forms
    products = {each: code for each, code in told["code"].items() if re.search(r"_int8_\d+x\d+$", each)}
    assert len(products) >= 3 * (len(forms) + 1) * bool(instruction)
    in_int16 = [code for each, code in told["code"].items() if re.search(r"_int16_\d+x\d+$", each)]
    assert len(in_int16) == 3 * (name in ("haswell", "alderlake"))
    assert all(re.search(r"\bvpmaddwd\s.*%ymm", code) for code in in_int16)
    for each, code in told["code"].items():
        assert not re.search(r"^\s+(bl|callq?)\s+(?!memcpy|memset)", code, re.MULTILINE), (
            f"{each} calls a library"
        )
        if each in products:
            assert re.search(instruction, code), f"{each} does not multiply bytes"
