"""The rounding error of quantised tensors, by class of tensor."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_NUMBER = re.compile(r"\b\d+\b")


@dataclass
class Class:
    """All layers' tensors with one name, such as self_attn.q_proj. `before` and `after` are sizes in bytes;
    `squares` and `error` are sums of squares of the weights and of their rounding errors."""

    tensors: int = 0
    numbers: int = 0
    before: int = 0
    after: int = 0
    format: str = ""
    squares: float = 0.0
    error: float = 0.0

    @property
    def relative_error(self) -> float:
        """The root mean square of the rounding errors, divided by that of the weights."""
        return (self.error / self.squares) ** 0.5 if self.squares else 0.0


@dataclass
class Report:
    """The tensors that were written: class → its sizes and error."""

    classes: dict[str, Class] = field(default_factory=lambda: defaultdict(Class))
    fused: list[str] = field(default_factory=list)
    """Classes of experts that are stored as one tensor and stay unquantised."""

    def add(self, name: str, format: str, numbers: int, before: int, after: int) -> Class:
        found = self.classes[class_of(name)]
        found.tensors += 1
        found.numbers += numbers
        found.before += before
        found.after += after
        found.format = format
        return found

    @property
    def fused_share(self) -> float:
        """The share of weights that belong to the classes in `fused`."""
        fused = sum(self.classes[name].numbers for name in self.fused)
        return fused / (sum(entry.numbers for entry in self.classes.values()) or 1)

    @property
    def before(self) -> int:
        return sum(entry.before for entry in self.classes.values())

    @property
    def after(self) -> int:
        return sum(entry.after for entry in self.classes.values())


def class_of(name: str) -> str:
    """``model.layers.3.mlp.experts.7.up_proj.weight`` → ``mlp.experts.up_proj``."""
    parts = [part for part in name.removesuffix(".weight").split(".") if not _NUMBER.fullmatch(part)]
    return ".".join(part for part in parts if part not in ("model", "layers", "blk"))


def add_error(entry: Class, values: NDArray[np.float32], rounded: NDArray[np.float32]) -> None:
    entry.squares += float(np.square(values, dtype=np.float64).sum())
    entry.error += float(np.square(values - rounded, dtype=np.float64).sum())
