"""The registry of benchmark cases: a family yields named cases, which build their inputs in their turn."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping

import torch

import tests.kernels.kernel_cases as package

Call = Callable[[], torch.Tensor | None]


def half(device: torch.device) -> torch.dtype:
    """The dtype of a case's numbers: bfloat16, also on the meta device, where a GPU's launches are noted;
    float16 on the CPU, whose interpreter multiplies the bits of bfloat16."""
    return torch.float16 if device.type == "cpu" else torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Work:
    """One kernel on one set of random inputs, which are on the device already.

    run : the kernel; returns its output, or None where `result` reads it
    moved : bytes that must be read and written once
    flop : floating-point operations that must be done by matrix units
    rivals : the same by other means, by name. Names that begin with "torch" are torch's own; others ours
        in another form. A rival that raises is unavailable here.
    checks : calls whose outputs the kernel's is compared with; None: the rivals
    reset : before a run that is checked: NaN over the outputs, and first values where inputs are overwritten
    """

    run: Call
    moved: int
    flop: int = 0
    rivals: Mapping[str, Call] = dataclasses.field(default_factory=dict)
    checks: Mapping[str, Call] | None = None
    reset: Callable[[], object] = lambda: None
    result: Callable[[], torch.Tensor] | None = None

    def outcome(self, call: Call) -> torch.Tensor:
        """A copy of the output of `call`, which is `run` or one of the others."""
        self.reset()
        given = call()
        if given is None:
            assert self.result is not None
            given = self.result()
        return given.clone()

    def errors(self) -> tuple[dict[str, float], dict[str, str]]:
        """`difference` to the output of each check; the reasons of those that cannot run here.

        Raises
        ------
        ValueError
            Where the kernel leaves a part of its output unwritten or writes NaN, and where a second run gives
            other bits.
        """
        ours = self.outcome(self.run)
        if missing := int(ours.isnan().sum()):
            raise ValueError(f"{missing} of {ours.numel()} numbers of the output are NaN or were not written")
        if not torch.equal(ours, self.outcome(self.run)):
            raise ValueError("a second run on the same inputs gives other bits")
        found, failed = {}, {}
        for name, call in (self.rivals if self.checks is None else self.checks).items():
            try:
                found[name] = difference(ours, self.outcome(call))
            except Exception as error:  # compilers and libraries fail with types of their own
                failed[name] = reason(error)
        return found, failed


def difference(ours: torch.Tensor, other: torch.Tensor) -> float:
    """‖ours - other‖ / ‖other‖, or for whole numbers the share that differs."""
    if not other.is_floating_point():
        return (ours.flatten() != other.flatten()).float().mean().item()
    wide = other.float().flatten()
    return ((ours.float().flatten() - wide).norm() / wide.norm()).item()


def reason(error: Exception) -> str:
    """The error's type and its first line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


@dataclasses.dataclass(frozen=True)
class Case:
    """A name, and the work that it builds on a device.

    needs : bytes of device memory, about, for its inputs and its rivals'
    expected : share of the ceiling, by estimate for an H100
    compiled : beside code that torch.compile makes, which takes 10 to 20 s
    """

    name: str
    build: Callable[[torch.device], Work]
    needs: int = 0
    expected: float | None = None
    compiled: bool = False

    def lacks(self, device: torch.device) -> str | None:
        """The reason why `device` has no room for the case; None if it has."""
        if device.type != "cuda" or self.needs <= 0.8 * torch.cuda.mem_get_info(device)[0]:
            return None
        return f"needs about {self.needs / 1e9:.0f} GB"


Family = Callable[[bool], Iterator[Case]]
_families: dict[str, Family] = {}


def family(function: Family) -> Family:
    """Register a function of `tiny`: True asks for the same cases in sizes that the interpreter can run."""
    _families[function.__name__] = function
    return function


def cases(*, tiny: bool = False, compiled: bool = False) -> Iterator[Case]:
    """Every case of every module of this folder; with `compiled` those that torch.compile takes long for."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for name in sorted(_families):
        yield from (case for case in _families[name](tiny) if case.compiled == compiled)
