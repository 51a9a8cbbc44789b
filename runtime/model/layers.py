"""The parts that decoder-only transformers share: fused linear maps, RMS norm, the gated MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ramify.kernels import registry
from ramify.kernels.reference import linear as reference
from ramify.kernels.reference.activation import gelu_mul, silu_mul
from ramify.kernels.reference.lora import lora as reference_lora
from ramify.kernels.reference.matmul import plain_matmul
from ramify.kernels.reference.norm import rms_norm
from ramify.kernels.reference.quantised import quantised_matmul
from ramify.kernels.weights.lora import MOST_PARTS, Extra, LoraRows, LoraTable
from ramify.kernels.weights.packed import PackedWeight, pack
from ramify.kernels.weights.quantised import QuantisedWeight, Rounded, lay_out, multiplies_float8
from ramify.kernels.weights.rows import Rows
from ramify.kernels.weights.stack import Norm
from ramify.runtime.model.shape.config import Activation


@dataclass(frozen=True)
class Rotary:
    """Rows of `heads` heads of `size` elements. The first `rotated` elements of each head rotate in pairs."""

    heads: int
    size: int
    rotated: int


@dataclass(frozen=True)
class Slot:
    """The destination of one tensor of a checkpoint."""

    target: Tensor
    rotary: Rotary | None = None
    """The heads that rotate, in the tensor's first rows; None if none does. The two elements of each rotary
    pair are moved next to each other."""
    keep: Callable[[Rows], bool] | None = None
    """Callback that takes quantised rows; returns False if their dequantised values shall fill `target`."""
    offset: float = 0.0
    """Number that is added to the checkpoint's values."""
    part: tuple[Linear, str] | None = None
    """(matrix, name of a projection in the matrix), if the tensor is that projection's weight and LoRA
    adapters can change it; else None."""
    filled: Callable[[], None] | None = None
    """Callback after the slot is filled."""
    order: Tensor | None = None
    """For each row of `target`, the index of the checkpoint's row; None: the same order. `rotary` refers to
    the order of `target`."""


Slots = Iterator[tuple[str, Slot]]
"""(tensor's name in Hugging Face checkpoints, without the prefix of the module that yields the slot;
slot)."""


Reduce = Callable[[Tensor], Tensor]
"""Function from this rank's term to the sum of all ranks' terms, which have one shape and dtype. Every rank
gets the same bits. The sum may be written to the term's memory."""


class RMSNorm(nn.Module):
    """RMS norm, computed by `op`. `forward` takes and returns (T, size).

    With an `offset` the weight is the checkpoint's value plus `offset`. This sum is kept in float32: rounding
    it to bfloat16 would lose bits of the checkpoint's value.
    """

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, rotary: Rotary | None = None, offset: float = 0.0
    ) -> None:
        super().__init__()
        self.weight = _parameter(torch.ones(size, dtype=torch.float32 if offset else dtype))
        self.eps, self.rotary, self.offset = eps, rotary, offset
        self.op: registry.RmsNorm = rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, self.weight, self.eps)

    def use_kernels(self, ops: registry.Ops) -> None:
        self.op = ops.rms_norm

    @property
    def fused(self) -> Norm:
        """The norm's weight and epsilon, for kernels that fuse the norm with another operation."""
        return self.weight, self.eps

    def slots(self) -> Slots:
        yield "weight", Slot(self.weight, self.rotary, offset=self.offset)


class HeadNorms(NamedTuple):
    """Weights, (head_dim,), and epsilon of the norms over each query head and each key head."""

    q: Tensor
    k: Tensor
    eps: float


class Residual:
    """The residual stream, (T, hidden).

    With `add_norm`, a kernel that adds and normalises in one pass, an addition is deferred until the next
    norm.
    """

    def __init__(self, x: Tensor, add_norm: registry.AddRmsNorm | None = None) -> None:
        self._x = x
        self._add_norm = add_norm
        self._term: Tensor | None = None

    @property
    def defers(self) -> bool:
        return self._add_norm is not None

    def value(self) -> Tensor:
        """The stream with every addition applied. Callers may change it in place."""
        if self._term is not None:
            self._x += self._term
            self._term = None
        return self._x

    def normed(self, norm: RMSNorm) -> Tensor:
        if self._term is None or self._add_norm is None:
            return norm.forward(self._x)
        term, self._term = self._term, None
        return self._add_norm(term, self._x, norm.weight, norm.eps, out=term)

    def rounded(self, norm: RMSNorm, op: registry.NormFloat8, matrix: QuantisedWeight) -> Rounded:
        """`normed`, rounded to float8 for products with `matrix`."""
        term, self._term = self._term, None
        if term is None:
            return op(self._x, norm.weight, norm.eps, matrix)
        return op(term, norm.weight, norm.eps, matrix, residual=self._x)

    def add(self, term: Tensor) -> None:
        """Add `term`, (T, hidden), to the stream, which may later overwrite the memory of `term`."""
        x = self.value()
        if self.defers:
            self._term = term
        else:
            x += term


class Adapted:
    """The adapters of a step, for all projections of a model."""

    def __init__(self) -> None:
        self.rows: LoraRows | None = None
        """Adapters of the step's rows; None outside a step, and in a step without adapters."""
        self.op: registry.Lora = reference_lora


class Linear(nn.Module):
    """x ↦ x Wᵀ + b for several projections of the same input, stacked into one matrix.

    `parts` maps the checkpoint's name of each projection to its number of rows. With a `gate` the result is
    gate(first half of the rows) · second half. `weight`, if given, is another module's parameter, which this
    matrix shares (a head tied to the embedding).
    """

    def __init__(
        self,
        inputs: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        rotary: Mapping[str, Rotary] | None = None,
        order: Mapping[str, Tensor] | None = None,
        gate: Activation | None = None,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.inputs, self.parts = inputs, dict(parts)
        self.rotary, self.order = dict(rotary or {}), dict(order or {})
        self.gate = gate
        outputs = sum(self.parts.values())
        self.weight: Tensor = (
            _parameter(torch.empty(outputs, inputs, dtype=dtype)) if weight is None else weight
        )
        self.bias = _parameter(torch.empty(outputs, dtype=dtype)) if bias else None
        self.packed: list[PackedWeight] = []
        """Packed matrices, which hold the rows of `weight` in order. If there are any, `weight` is empty; in
        a head that shares the embedding's weight it is not."""
        self.quantised: list[tuple[slice, QuantisedWeight | Tensor, Tensor | None]] = []
        """(outputs, matrix, bias) for each part of `weight`, if `lay_out` found a quantised part; `weight` is
        then empty."""
        self.op: registry.Linear = reference.linear
        self.matmul: registry.MatMul = plain_matmul
        self.quantised_matmul: registry.QuantisedMatMul = quantised_matmul
        self.float8: registry.Float8Ops | None = None
        self.activation: registry.GatedActivation | None = None
        if gate is not None:
            self.activation = silu_mul if gate == "silu" else gelu_mul
        self._rows: dict[str, Rows] = {}
        self.lora = LoraTable()
        self.adapted = Adapted()
        """The adapters of the step. All projections of a model share one object."""
        self.adaptable = len(self.parts) <= MOST_PARTS
        """Whether adapters can change the matrix."""
        self._unfilled: set[str] | None = None
        self._pack: Callable[[], None] | None = None
        self.reduce: Reduce | None = None
        """Function that sums the products of all ranks, if the matrix's inputs are divided among ranks; else
        None."""

    def use_kernels(self, ops: registry.Ops) -> None:
        """Use the kernels of `ops`; an operation that `ops` lacks keeps its kernel."""
        self.op = ops.layer_linear or ops.linear or self.op
        self.matmul = ops.matmul or self.matmul
        self.quantised_matmul = ops.quantised_matmul or self.quantised_matmul
        self.float8 = ops.float8
        if self.gate is not None:
            op = ops.silu_mul if self.gate == "silu" else ops.gelu_mul
            self.activation = op or self.activation

    def forward(self, x: Tensor | Rounded) -> Tensor:
        """(T, inputs) -> (T, outputs), or (T, outputs / 2) with a gate."""
        if isinstance(x, Rounded):
            return self._gated(self._product(x))
        if self.reduce is not None:
            return self.reduce(self._term(x)).to(x.dtype)
        if len(self.packed) == 1:
            return self._gated(self.op(x, self.packed[0], extra=self._extra(x)))
        if not self.packed:
            return self._gated(self._adapt(x, self._product(x)))
        y = x.new_empty(len(x), sum(part.outputs for part in self.packed))
        self._parts(x, y, add=False)
        return self._gated(y)

    @property
    def takes_float8(self) -> QuantisedWeight | None:
        """The matrix for which the operation before this product rounds its result to float8; None where
        the product rounds its input itself, or an adapter or another rank needs the input."""
        if self.float8 is None or len(self.quantised) != 1 or self.reduce is not None:
            return None
        weight, adapted = self.quantised[0][1], self.adapted.rows is not None and bool(self.lora)
        if isinstance(weight, Tensor) or adapted or not multiplies_float8(weight):
            return None
        return weight

    def forward_normed(self, x: Residual, norm: RMSNorm) -> Tensor:
        """`forward` of norm(x)."""
        if len(self.packed) == 1 and not norm.offset:
            value = x.value()
            extra = self._extra(value, norm.fused)
            return self._gated(self.op(value, self.packed[0], norm=norm.fused, extra=extra))
        if self.takes_float8 is not None:
            return self._gated(self._of_normed(x, norm))
        return self.forward(x.normed(norm))

    def forward_normed_for(self, then: Linear, x: Residual, norm: RMSNorm) -> Tensor | Rounded:
        """`forward_normed` of a matrix with a gate whose result `then` alone takes: rounded to float8 where
        `then` takes that."""
        if (matrix := then.takes_float8) is None or self.float8 is None:
            return self.forward_normed(x, norm)
        return self.float8.gate_float8(self._of_normed(x, norm), matrix, gelu=self.gate != "silu")

    def _of_normed(self, x: Residual, norm: RMSNorm) -> Tensor:
        """The product with norm(x), without the gate, for matrices that are not packed."""
        if self.float8 is not None and (matrix := self.takes_float8) is not None:
            return self._product(x.rounded(norm, self.float8.norm_float8, matrix))
        y = x.normed(norm)
        return self._adapt(y, self._product(y))

    def add_to(self, residual: Residual, x: Tensor | Rounded) -> None:
        """residual += x Wᵀ + b."""
        if isinstance(x, Rounded):
            residual.add(self._product(x))
        elif self.reduce is not None:
            total = self.reduce(self._term(x))
            if self.packed:
                residual.value().add_(total)
            else:
                residual.add(total)
        elif self.packed:
            self._parts(x, residual.value(), add=True)
        elif residual.defers:
            residual.add(self._adapt(x, self._product(x)))
        else:
            self._product(x, residual.value(), add=True)
            self._adapt(x, residual.value())

    def _term(self, x: Tensor) -> Tensor:
        """This rank's term of x Wᵀ + b: float32 from packed matrices, so that only the sum is rounded."""
        if not self.packed:
            return self._product(x)
        y = x.new_empty((len(x), sum(part.outputs for part in self.packed)), dtype=torch.float32)
        self._parts(x, y, add=False)
        return y

    def _product(self, x: Tensor | Rounded, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """x Wᵀ + b for matrices that are not packed."""
        if isinstance(x, Rounded):
            ((_, weight, bias),) = self.quantised
            assert self.float8 is not None
            assert isinstance(weight, QuantisedWeight)
            out = torch.empty(len(x.numbers), weight.outputs, dtype=x.dtype, device=x.numbers.device)
            return self.float8.multiply_float8(x, weight, bias, out=out)
        if not self.quantised:
            return self.matmul(x, self.weight, self.bias, out=out, add=add)
        if out is None:
            out = x.new_empty(len(x), sum(self.parts.values()))
        for outputs, weight, bias in self.quantised:
            if isinstance(weight, Tensor):
                self.matmul(x, weight, bias, out=out[:, outputs], add=add)
            else:
                self.quantised_matmul(x, weight, bias, out=out[:, outputs], add=add)
        return out

    def _adapt(self, x: Tensor, y: Tensor) -> Tensor:
        """Add to y, (T, outputs), the LoRA terms of the step's adapters."""
        rows = self.adapted.rows
        return y if rows is None or not self.lora else self.adapted.op(x, self.lora, rows, out=y)

    def _extra(self, x: Tensor, norm: Norm | None = None) -> Extra | None:
        """The LoRA terms for input norm(x), or for x if `norm` is None; None without adapters."""
        rows = self.adapted.rows
        if rows is None or not self.lora:
            return None
        terms = x.new_zeros((len(x), sum(self.parts.values())), dtype=torch.float32)
        return Extra(self.adapted.op(x, self.lora, rows, out=terms, norm=norm), rows)

    def _gated(self, y: Tensor) -> Tensor:
        if self.activation is None or (self.packed and self.packed[0].gated):
            return y
        return self.activation(y)

    def _parts(self, x: Tensor, out: Tensor, *, add: bool) -> None:
        extra = self._extra(x)
        if len(self.packed) == 1:
            self.op(x, self.packed[0], out=out, add=add, extra=extra)
            return
        start = 0
        for part in self.packed:
            columns = slice(start, start + part.outputs)
            terms = None if extra is None else Extra(extra.terms[:, columns], extra.rows)
            self.op(x, part, out=out[:, columns], add=add, extra=terms)
            start += part.outputs

    def slots(self) -> Slots:
        start = 0
        for name, rows in self.parts.items():
            rotary, order, part = self.rotary.get(name), self.order.get(name), slice(start, start + rows)
            full = f"{name}.weight"
            yield (
                full,
                Slot(
                    self.weight[part],
                    rotary,
                    partial(self.keep_rows, name),
                    part=(self, name) if self.adaptable else None,
                    filled=partial(self.mark_filled, full),
                    order=order,
                ),
            )
            if self.bias is not None:
                full = f"{name}.bias"
                filled = partial(self.mark_filled, full)
                yield full, Slot(self.bias[part], rotary, filled=filled, order=order)
            start += rows

    def pack_when_filled(self, pack: Callable[[], None]) -> None:
        """Call `pack` as soon as all slots of this matrix are filled. If packing waited for the other
        matrices, the whole model would be in memory twice."""
        self._pack = pack
        self._unfilled = {name for name, _ in self.slots()}

    def mark_filled(self, name: str) -> None:
        """Note that the slot `name` is filled, and pack if no slot is left to fill."""
        if self._unfilled is None:
            return
        self._unfilled.discard(name)
        if not self._unfilled and self._pack is not None:
            self._pack()

    def keep_rows(self, name: str, rows: Rows) -> bool:
        """Keep the quantised rows of the part `name`."""
        self._rows[name] = rows
        return True

    def pack(self, form: Callable[[Tensor], Rows] | None) -> None:
        """Replace `weight` by packed matrices: of the checkpoint's quantised rows for parts that have some,
        of form(weight) for others.

        `weight` stays if `form` is None and a part has no quantised rows. Matrices that are packed already
        stay as they are.
        """
        if self.packed:
            return
        if form is None and len(self._rows) < len(self.parts):
            for name, part in zip(
                self.parts, torch.split(self.weight, list(self.parts.values())), strict=True
            ):
                if name in self._rows:
                    part.copy_(self._rows[name].values())
            self._rows = {}
            return
        found = self._found(form or Rows)
        fused = self.gate == "silu" and len(found) == 1  # the kernels know no other gate
        self.use_packed([pack(rows, inputs=self.inputs, bias=bias, gated=fused) for rows, bias in found])

    def lay_out(self, form: Callable[[Tensor], Rows] | None, device: torch.device | str) -> None:
        """Move the weights to `device`. The checkpoint's quantised rows stay quantised; others become
        form(weight), if `form` is given."""
        start, found = 0, self._found(form or Rows)
        if all(rows.factors is None for rows, _ in found):
            self.weight = _parameter(self.weight.to(device))
            self.bias = None if self.bias is None else _parameter(self.bias.to(device))
            return
        for rows, bias in found:
            outputs, start = slice(start, start + len(rows)), start + len(rows)
            weight = lay_out(rows, inputs=self.inputs, device=device) or rows.numbers.to(device)
            self.quantised.append((outputs, weight, None if bias is None else bias.to(device)))
        self.weight, self.bias = _parameter(self.weight.new_empty(0, device=device)), None
        self._rows = {}

    def _found(self, form: Callable[[Tensor], Rows]) -> list[tuple[Rows, Tensor | None]]:
        """Rows and bias of each part. Adjacent parts of the same format are joined."""
        found: list[Rows] = []
        for name, part in zip(self.parts, torch.split(self.weight, list(self.parts.values())), strict=True):
            rows = self._rows.get(name) or form(part)
            if found and found[-1].alike(rows):
                found[-1] = found[-1].joined(rows)
            else:
                found.append(rows)
        counts = [len(rows) for rows in found]
        biases = [None] * len(found) if self.bias is None else list(torch.split(self.bias, counts))
        return list(zip(found, biases, strict=True))

    def use_packed(self, packed: list[PackedWeight]) -> None:
        """Multiply by `packed` from now on. The unpacked weights are dropped."""
        self.packed = packed
        self.weight, self.bias = _parameter(self.weight.new_empty(0)), None
        self._rows = {}


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)): SwiGLU or GEGLU (arXiv 2002.05202).

    `parts`: as in `Linear`, given for checkpoints in which gate and up are one tensor.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        activation: Activation = "silu",
        parts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        parts = parts or {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up = Linear(hidden, parts, bias=bias, dtype=dtype, gate=activation)
        self.down = Linear(intermediate, {"down_proj": hidden}, bias=bias, dtype=dtype)

    def forward_normed(self, x: Residual, norm: RMSNorm) -> Tensor:
        """mlp(norm(x)), (T, hidden)."""
        return self.down.forward(self.gate_up.forward_normed_for(self.down, x, norm))  # (T, intermediate)

    def forward(self, x: Tensor) -> Tensor:
        return self.down.forward(self.gate_up.forward(x))  # (T, intermediate)

    def add_to(self, residual: Residual, norm: RMSNorm) -> None:
        """residual += mlp(norm(residual))."""
        self.down.add_to(residual, self.gate_up.forward_normed_for(self.down, residual, norm))

    def weights(self) -> tuple[PackedWeight, PackedWeight] | None:
        """The packed matrices gate_up and down; None unless each is packed as one part."""
        if len(self.gate_up.packed) != 1 or len(self.down.packed) != 1:
            return None
        return self.gate_up.packed[0], self.down.packed[0]

    def slots(self) -> Slots:
        yield from self.gate_up.slots()
        yield from self.down.slots()


def under(prefix: str, slots: Slots) -> Slots:
    """`slots` with `prefix` before each name."""
    return ((prefix + name, slot) for name, slot in slots)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
