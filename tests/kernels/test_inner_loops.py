"""Inner loops as code for processors that are not here: their instructions, and no call of a library.

Results are tested where an instruction is: on x86, with as many lanes (`test_registry`, `test_linear_int8`).
"""

from __future__ import annotations

import re

import pytest

from tests.kernels.inner_loops import ARM, X86, Told, loops_for

pytestmark = pytest.mark.slow
NEON = {"apple-m1": "+neon,+fp-armv8,+fullfp16,+dotprod", "neoverse-v1": "+neon,+fp-armv8,+sve,+bf16"}
AVX2 = "+avx,+avx2,+fma,+f16c,+ssse3,+sse2"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq"
BYTES = {
    "apple-m1": (ARM, NEON["apple-m1"], r"\bsdot\s+v\d+\.4s", ["int8", "int4"]),
    "haswell": (X86, AVX2, r"\bvpmaddubsw\s.*%ymm", ["int4"]),
    "alderlake": (X86, f"{AVX2},+avxvnni", r"\bvpdpbusd\s.*%ymm", ["int8", "int4"]),
    "skylake-avx512": (X86, AVX512, "", []),
    "cascadelake": (X86, f"{AVX512},+avx512vnni", r"\bvpdpbusd\s.*%zmm", ["int8", "int4"]),
}
"""Triple, features, the instruction that multiplies bytes, and the formats of weights it is used for."""


def checked(told: Told) -> dict[str, str]:
    for name, code in told.code.items():
        found = re.search(r"^\s+(bl|callq?)\s+(?!memcpy|memset)", code, re.MULTILINE)
        assert not found, f"{name} calls a library"
    return told.code


@pytest.mark.parametrize("name", NEON)
def test_products_of_floats_are_neon(name: str) -> None:
    told = loops_for("float", ARM, name, NEON[name])
    assert told.lanes == 4
    code = checked(told)
    products = {each: text for each, text in code.items() if "linear" in each or "product" in each}
    assert len([each for each in products if "linear" in each]) >= 6 * 3
    assert len(products) < len(code), "and the transposes"
    for each, text in products.items():
        assert re.search(r"\bfmla\s+v\d+\.4s", text), f"{each} does not multiply vectors"
    for form in ("f32", "bf16"):
        product = products[f"ramify_linear_{form}_f32_4x1"]
        assert not re.search(r"\bq\d+.*\[sp", product), "sums or weights spill from the registers"


@pytest.mark.parametrize("name", BYTES)
def test_products_of_bytes_have_the_processors_instruction(name: str) -> None:
    triple, features, instruction, forms = BYTES[name]
    told = loops_for("bytes", triple, name, features)
    assert told.forms == forms
    code = checked(told)
    products = [text for each, text in code.items() if re.search(r"_int8_\d+x\d+$", each)]
    assert len(products) >= 3 * (len(forms) + 1) * bool(instruction)
    assert all(re.search(instruction, text) for text in products)
    in_int16 = [text for each, text in code.items() if re.search(r"_int16_\d+x\d+$", each)]
    assert len(in_int16) == 3 * (name in ("haswell", "alderlake"))
    assert all(re.search(r"\bvpmaddwd\s.*%ymm", text) for text in in_int16)
