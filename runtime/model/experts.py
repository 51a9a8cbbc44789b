"""The mixture of experts: a router, the experts of which each token uses a few, and a shared expert that
every token uses."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ramify.kernels import registry
from ramify.kernels.reference import experts as reference
from ramify.kernels.reference.matmul import plain_matmul
from ramify.kernels.weights.packed import PackedWeight, Stack, pack, unstacked
from ramify.kernels.weights.rows import Rows
from ramify.kernels.weights.stack import ExpertMatrices, PackedExperts
from ramify.runtime.model.layers import GatedMLP, Residual, RMSNorm, Slot, Slots, under
from ramify.runtime.model.shape.config import Experts, ModelConfig

log = logging.getLogger(__name__)

Entry = Tensor | Rows


class MixtureOfExperts(nn.Module):
    """Σ weight · down(gate_up(x)) over the chosen experts, plus the shared expert.

    The router's weights and logits are float32: two experts' scores are often close, and a choice in bfloat16
    would differ from the choice of the checkpoint's own code.
    """

    def __init__(self, hidden: int, experts: Experts, dtype: torch.dtype, *, layer: int = 0) -> None:
        super().__init__()
        self.experts, self.layer = experts, layer
        count, size = experts.count, experts.size

        def parameter(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

        rows = count + experts.shared_gate
        self.router = parameter(rows, hidden, dtype=torch.float32)
        self.router_bias = parameter(rows, dtype=torch.float32) if experts.router_bias else None
        self.correction = parameter(count, dtype=torch.float32) if experts.correction else None
        self.gate_up, self.down = parameter(count, 2 * size, hidden), parameter(count, hidden, size)
        self.gate_up_bias = parameter(count, 2 * size) if experts.bias else None
        self.down_bias = parameter(count, hidden) if experts.bias else None
        self.shared: GatedMLP | None = None
        if experts.shared_size:
            self.shared = GatedMLP(hidden, experts.shared_size, bias=False, dtype=dtype)
            # The compiled block has no place for the terms of adapters.
            self.shared.gate_up.adaptable = self.shared.down.adaptable = False
        self.packed: list[PackedWeight] = []
        """Packed router, gate_up and down; the last two hold all experts (`Stack`). Empty before packing."""
        self.matmul: registry.MatMul = plain_matmul
        self.mixture: registry.Mixture = reference.mixture
        self.block: registry.ExpertBlock = reference.expert_block
        self._block_weights: PackedExperts | None = None
        self._rows: dict[tuple[str, int], Rows] = {}
        self._gate_up, self._down = Stack(count), Stack(count)
        self.keeps = True
        """Whether the checkpoint's quantised rows are kept and packed. If not, they are dequantised."""

    def use_kernels(self, ops: registry.Ops) -> None:
        """Use the kernels of `ops`; an operation that `ops` lacks keeps its kernel."""
        self.matmul = ops.matmul or self.matmul
        self.mixture, self.block = ops.mixture or self.mixture, ops.expert_block or self.block

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights()
        return self._unpacked(x) if weights is None else self.block(x, weights)

    def forward_normed(self, x: Residual, norm: RMSNorm) -> Tensor:
        """The mixture of norm(x), (T, hidden)."""
        return self.forward(x.normed(norm))

    def add_to(self, residual: Residual, norm: RMSNorm) -> None:
        """residual += mixture(norm(residual))."""
        weights = self.weights()
        if weights is None or norm.offset:
            residual.add(self.forward_normed(residual, norm))
        else:
            x = residual.value()
            self.block(x, weights, norm=norm.fused, out=x, add=True)

    def _unpacked(self, x: Tensor) -> Tensor:
        count = self.experts.count
        logits = self.matmul(x.float(), self.router, self.router_bias)
        chosen, weights = reference.route(logits[:, :count], self.experts.routing, self.correction)
        out = None
        if self.shared is not None:
            out = self.shared.forward(x)
            if self.experts.shared_gate:
                out.mul_(F.sigmoid(logits[:, count:]))
        biases = self.gate_up_bias, self.down_bias
        matrices = ExpertMatrices(self.gate_up, self.down, *biases, self.experts.clamp)
        return self.mixture(x, chosen, weights, matrices, out=out, add=out is not None)

    def weights(self) -> PackedExperts | None:
        """The packed weights; None if a matrix is not packed."""
        if self._block_weights is None and self.packed:
            shared = None
            if self.shared is not None:
                shared = self.shared.weights()
                if shared is None:
                    return None
            router, gate_up, down = self.packed
            self._block_weights = PackedExperts(
                self.experts.routing,
                router,
                unstacked(gate_up, self.experts.count),
                unstacked(down, self.experts.count),
                correction=self.correction,
                shared=shared,
            )
        return self._block_weights

    def slots(self) -> Slots:
        """The checkpoint's tensors with their slots; none once the matrices are packed."""
        if self.packed:
            return
        count, size = self.experts.count, self.experts.size
        yield "gate.weight", Slot(self.router[:count])
        if self.router_bias is not None:
            yield "gate.bias", Slot(self.router_bias[:count])
        if self.correction is not None:
            yield "gate.e_score_correction_bias", Slot(self.correction)
        for index in range(count):
            for name, part in (("gate", slice(size)), ("up", slice(size, None)), ("down", slice(None))):
                matrix, bias = (
                    (self.down, self.down_bias) if name == "down" else (self.gate_up, self.gate_up_bias)
                )
                keep = partial(self.keep_rows, name, index)
                yield f"experts.{index}.{name}_proj.weight", Slot(matrix[index, part], keep=keep)
                if bias is not None:
                    yield f"experts.{index}.{name}_proj.bias", Slot(bias[index, part])
        if self.shared is not None:
            yield from under("shared_expert.", self.shared.slots())
        if self.experts.shared_gate:
            yield "shared_expert_gate.weight", Slot(self.router[count:])

    def keep_rows(self, name: str, index: int, rows: Rows) -> bool:
        """Keep `rows`, and pack an expert's matrix once its rows are complete. So few rows stay unpacked.

        Returns False if the rows are not kept: the caller then copies their dequantised values.
        """
        if not self.keeps or rows.order is not None:  # stacked experts have one order of inputs
            return False
        self._rows[name, index] = rows
        if name == "down":
            return self._down.put(index, self._laid_out(self._rows.pop((name, index))))
        gate, up = (self._rows.get((part, index)) for part in ("gate", "up"))
        if gate is None or up is None:
            return True
        del self._rows["gate", index], self._rows["up", index]
        if not gate.alike(up):
            gate, up = gate.with_offsets(), up.with_offsets()
        if not gate.alike(up) or not self._gate_up.put(index, self._laid_out(gate.joined(up), gated=True)):
            self.gate_up[index] = torch.cat([gate.values(), up.values()])
        return True

    def _laid_out(self, rows: Rows, *, gated: bool = False) -> PackedWeight:
        inputs = self.gate_up.shape[2] if gated else self.down.shape[2]
        return pack(rows, inputs=inputs, gated=gated, clamp=self.experts.clamp if gated else None)

    def pack(self, form: Callable[[Tensor], Rows] | None) -> None:
        """Pack every matrix that is not packed yet, one expert at a time. `form`: see `Linear.pack`."""
        for (name, index), rows in self._rows.items():  # the other half came as values
            half = slice(None, self.experts.size) if name == "gate" else slice(self.experts.size, None)
            self.gate_up[index, half] = rows.values()
        self._rows = {}
        for name, stack, values in (
            ("gate_up", self._gate_up, self.gate_up),
            ("down", self._down, self.down),
        ):
            if stack.there and (missing := set(range(self.experts.count)) - stack.there):
                log.warning(
                    "Layer %d: %s of all experts is dequantised to %s, %.2f GiB, because expert %d is not "
                    "quantised as the others.",
                    self.layer,
                    name,
                    values.dtype,
                    values.nbytes / 2**30,
                    min(missing),
                )
                stack.unpack_into(values)
        if form is None and not self._gate_up.there and not self._down.there:
            return
        form = form or Rows
        for stack, values, gated in ((self._gate_up, self.gate_up, True), (self._down, self.down, False)):
            for index in range(0 if stack.there else self.experts.count):
                stacked = stack.put(index, self._laid_out(form(values[index]), gated=gated))
                assert stacked, "form gives one form"
        router = pack(Rows(self.router), inputs=self.router.shape[1], bias=self.router_bias)
        self.use_packed([router, self._gate_up.whole(self.gate_up_bias), self._down.whole(self.down_bias)])

    def use_packed(self, packed: list[PackedWeight]) -> None:
        """Multiply by `packed` from now on. The unpacked weights are dropped."""
        self.packed = packed
        for name in ("router", "router_bias", "gate_up", "gate_up_bias", "down", "down_bias"):
            old = getattr(self, name)
            if old is not None:
                setattr(self, name, nn.Parameter(old.new_empty(0), requires_grad=False))
        self._gate_up, self._down = Stack(0), Stack(0)
        self._block_weights = None


def mlp_of(config: ModelConfig, index: int, dtype: torch.dtype) -> GatedMLP | MixtureOfExperts:
    """The MLP of layer `index`, or its mixture of experts: the sublayer after the second norm."""
    if config.experts is not None and config.experts.sparse[index]:
        return MixtureOfExperts(config.hidden_size, config.experts, dtype, layer=index)
    return GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        bias=config.mlp_bias,
        dtype=dtype,
        activation=config.activation,
    )


_NAMES = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.shared_mlp\.", ".mlp.shared_expert."),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        (r"\.mlp\.router(\.layer)?\.", ".mlp.gate."),
        (r"\.experts\.(\d+)\.w1\.", r".experts.\1.gate_proj."),
        (r"\.experts\.(\d+)\.w3\.", r".experts.\1.up_proj."),
        (r"\.experts\.(\d+)\.w2\.", r".experts.\1.down_proj."),
        (r"\.e_score_correction\.bias$", ".e_score_correction_bias"),
        (r"\.mlp\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.mlp\.output_linear\.weight$", ".mlp.experts.down_proj"),
        (r"\.shared_expert\.input_linear\.", ".shared_expert.gate_up_proj."),
        (r"\.shared_expert\.output_linear\.", ".shared_expert.down_proj."),
    )
]
"""(pattern in other families' tensor names, replacement as in Qwen's names, which `slots` has)."""


def expert_entries(stored: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
    """(name in `MixtureOfExperts.slots`, tensor) for the checkpoint's tensor `stored`; several entries if the
    tensor is fused."""
    for pattern, name in _NAMES:
        stored = pattern.sub(name, stored)
    stem, _, last = stored.rpartition(".experts.")
    if last == "gate_up_proj" and isinstance(entry, Tensor):
        for index, both in enumerate(entry):
            gate, up = both.chunk(2)
            yield f"{stem}.experts.{index}.gate_proj.weight", gate
            yield f"{stem}.experts.{index}.up_proj.weight", up
    elif last == "down_proj" and isinstance(entry, Tensor):
        for index, down in enumerate(entry):
            yield f"{stem}.experts.{index}.down_proj.weight", down
    elif stored.endswith(".shared_expert.gate_up_proj.weight"):
        half = len(entry) // 2
        for name, rows in (("gate_proj", slice(half)), ("up_proj", slice(half, None))):
            part = entry.index_select(rows) if isinstance(entry, Rows) else entry[rows]
            yield stored.replace("gate_up_proj", name), part
    else:
        yield stored, entry
