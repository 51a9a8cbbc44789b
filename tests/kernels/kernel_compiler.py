"""Triton kernels compiled for GPUs that are not there: launchers take CPU tensors and stop before the launch.

The interpreter accepts more than the compiler.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton import knobs
from triton.runtime.jit import JITFunction

from ramify.kernels.triton.ahead import absent
from ramify.kernels.triton.plan.attention_config import CARDS, Device


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """GPUs of one compute capability (CUDA programming guide, "compute capabilities").

    device : the figures that plans and tiles are made from, of the card in `name`
    shared, threads, programs : of a multiprocessor at the most; shared in bytes
    """

    name: str
    device: Device
    shared: int
    threads: int
    programs: int


_LIMITS = {
    80: (167936, 2048, 32),
    89: (102400, 1536, 24),
    90: (233472, 2048, 32),
    100: (233472, 2048, 32),
    120: (102400, 1536, 24),
}
GENERATIONS = {number: Generation(*CARDS[number], *limits) for number, limits in _LIMITS.items()}
REGISTERS = 65536
"""Registers of a multiprocessor; a warp takes them in pieces of 256."""
_PROGRAM_SHARED = 1024
"""Bytes that the driver takes of each program's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """One launch: `kernel` is Triton's, None where it was only noted; `programs` is their number."""

    name: str
    key: str
    kernel: Any
    programs: int

    @property
    def ptx(self) -> str:
        return str(self.kernel.asm["ptx"])


@contextmanager
def compiling(capability: int, *, noting: bool = False) -> Iterator[list[Compiled]]:
    """Compile launches for a compute capability instead of running them; gives them in their order.

    noting : do not even compile; `key` still says which of a kernel's forms would run
    """
    launches: list[Compiled] = []
    run, compile_ = JITFunction.run, JITFunction._do_compile
    last: list[str] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        last.clear()
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        programs = math.prod(grid(options) if callable(grid) else grid)
        launches.append(Compiled(self.fn.__name__, last[0] if last else "", kernel, programs))
        return kernel

    def note(self: Any, key: str, *rest: Any) -> Any:
        last.append(key)
        return None if noting else compile_(self, key, *rest)

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(JITFunction, "_do_compile", note),
        absent(capability),
    ):
        yield launches


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """The share of a multiprocessor that a compiled kernel takes, read off its machine code.

    registers : registers of a thread
    spills : loads and stores of registers that were put into memory
    hot_spills : those of them in the innermost loops that multiply matrices
    shared : bytes of a program
    programs : that run on a multiprocessor at once
    widths : by bytes a thread, the number of instructions that move them between registers or shared memory
        and device memory
    """

    registers: int
    spills: int
    hot_spills: int
    shared: int
    warps: int
    programs: int
    widths: dict[int, int]


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);")
_SPILL = re.compile(r"\b(?:STL|LDL)\b")
_MULTIPLY = re.compile(r"MMA\b")
_MOVE = re.compile(r"\b(?:LDG|STG|LDGSTS)\.([A-Z0-9.]*)")
_JUMP = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)")


def usage(kernel: Any, capability: int) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        resources, text = (
            subprocess.run(
                [knobs.nvidia.cuobjdump.path, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    registers = int(re.search(r"REG:(\d+)", resources)[1])  # type: ignore[index]
    code = [(int(found[1], 16), found[2]) for found in _INSTRUCTION.finditer(text)]
    widths = collections.Counter(
        int(size[0]) // 8 if (size := re.search(r"64|128", move[1])) else 4
        for _, instruction in code
        if (move := _MOVE.search(instruction))
    )
    limits, warps, shared = GENERATIONS[capability], kernel.metadata.num_warps, kernel.metadata.shared
    programs = min(
        limits.programs,
        limits.threads // (32 * warps),
        REGISTERS // (-(-registers * 32 // 256) * 256 * warps),
        limits.shared // (shared + _PROGRAM_SHARED),
    )
    hot = sum(sum(map(_is_spill, body)) for body in innermost_loops(code) if any(map(_MULTIPLY.search, body)))
    spills = sum(_is_spill(instruction) for _, instruction in code)
    return Usage(registers, spills, hot, shared, warps, programs, dict(widths))


def _is_spill(instruction: str) -> bool:
    return _SPILL.search(instruction) is not None


def innermost_loops(code: list[tuple[int, str]]) -> Iterator[list[str]]:
    """The bodies of the innermost loops: what lies between a jump back and its target.

    code : addresses and instructions
    """
    back = [
        (int(jump[1], 16), at)
        for at, instruction in code
        if (jump := _JUMP.search(instruction)) and int(jump[1], 16) < at
    ]
    for low, high in back:
        if not any(low <= other[0] and other[1] <= high and other != (low, high) for other in back):
            yield [instruction for at, instruction in code if low <= at <= high]
