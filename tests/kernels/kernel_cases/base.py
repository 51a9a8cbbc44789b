"""The registry of benchmark cases: a family yields named cases, which build their inputs in their turn."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping

import torch

import tests.kernels.kernel_cases as package

Call = Callable[[], torch.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Work:
    """One kernel on one set of inputs, which are on the device already.

    run : the kernel; returns its output, where it has one that rivals can be compared with
    moved : bytes that must be read and written once
    flop : floating-point operations that must be done by matrix units
    rivals : the same by other means, by name. Names that begin with "torch" are torch's own; others ours
        in another form. A rival that raises is unavailable here.
    """

    run: Call
    moved: int
    flop: int = 0
    rivals: Mapping[str, Call] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """`needs` bytes of device memory, about, for its inputs and its rivals'."""

    name: str
    build: Callable[[torch.device], Work]
    needs: int = 0


Family = Callable[[bool], Iterator[Case]]
_families: dict[str, Family] = {}


def family(function: Family) -> Family:
    """Register a function of `tiny`: True asks for the same cases in sizes that the interpreter can run."""
    _families[function.__name__] = function
    return function


def cases(*, tiny: bool = False) -> Iterator[Case]:
    """Every case of every module of this folder."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for name in sorted(_families):
        yield from _families[name](tiny)
