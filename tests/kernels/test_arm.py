"""The inner loops as code for ARM processors: they assemble, and multiply by NEON's vector instructions.

Nothing is run: what the loops compute is tested on x86, with as many lanes (`test_registry`).
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

def recorded(name, arguments, fill):
    made.append((name, arguments, fill))

functions.llvm_function = recorded
from ramify.kernels.cpu import attention_loops
from ramify.kernels.cpu.codegen.simd import LANES
from ramify.kernels.cpu.packed_linear import tiles

made = [each for each in made if "_tiles_" not in each[0]]  # AMX
for form in tiles.FORMS:
    tiles.products(form, False)
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
machine = target.create_target_machine(cpu=sys.argv[1], features=sys.argv[2], opt=3)
found = {}
for name, arguments, fill in made:
    if "_dots" in name or "_pairs" in name:  # of AVX512_BF16
        continue
    module = ir.Module()
    module.triple = "aarch64-unknown-linux-gnu"
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * arguments)
    function = ir.Function(module, kind, name)
    body = ir.IRBuilder(function.append_basic_block())
    fill(body, *function.args)
    body.ret_void()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    found[name] = machine.emit_assembly(parsed)
print(json.dumps({"lanes": LANES, "code": found}))
"""
pytestmark = pytest.mark.slow
PROCESSORS = {"apple-m1": "+neon,+fp-armv8,+fullfp16,+dotprod", "neoverse-v1": "+neon,+fp-armv8,+sve,+bf16"}


@pytest.mark.parametrize("name", PROCESSORS)
def test_inner_loops_are_neon(name: str) -> None:
    features = PROCESSORS[name]
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-c", CODE, name, features]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["lanes"] == 4
    products = {each: code for each, code in told["code"].items() if "linear" in each}
    assert len(products) >= 6 * 3
    for each, code in told["code"].items():
        assert not re.search(r"\bbl\s+(?!memcpy|memset)", code), f"{each} calls a library"
        if each in products or "product" in each:
            assert re.search(r"\bfmla\s+v\d+\.4s", code), f"{each} does not multiply vectors"
    for form in ("f32", "bf16"):
        product = products[f"ramify_linear_{form}_f32_4x1"]
        assert not re.search(r"\bq\d+.*\[sp", product), "sums or weights spill from the registers"
