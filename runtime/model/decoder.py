"""Models of our own families without their layers: embedding, final norm, head. The executor owns the KV
pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ramify.kernels import registry
from ramify.kernels.reference import linear as reference
from ramify.kernels.reference import logits as reference_logits
from ramify.kernels.reference.quantised import quantised_matmul
from ramify.kernels.weights.packed import PackedWeight, pack
from ramify.kernels.weights.quantised import QuantisedWeight, lay_out
from ramify.kernels.weights.rows import Rows
from ramify.kernels.weights.stack import LayerWeights
from ramify.runtime.model.causal_lm import Attend, CausalLM
from ramify.runtime.model.experts import Entry, MixtureOfExperts, expert_entries
from ramify.runtime.model.layers import (
    ActivationOp,
    Linear,
    NormOp,
    Reduce,
    Residual,
    RMSNorm,
    Slot,
    Slots,
    plain_matmul,
    under,
)
from ramify.runtime.model.rope import rotations
from ramify.runtime.model.shape.config import Activation, ModelConfig


class Layer(nn.Module, ABC):
    """One transformer layer."""

    @abstractmethod
    def forward(self, x: Residual, rotation: Tensor, attend: Attend) -> None:
        """Add the layer's output to x. rotation: (T, head_dim / 2) complex64."""

    def weights(self) -> LayerWeights | None:
        """Packed weights for a kernel that computes whole layers. None if a matrix is not packed, or the
        layer is not of the form that `LayerWeights` describes."""
        return None

    def join(self, reduce: Reduce) -> None:
        """Use `reduce` to add the partial results of all ranks. Called if the config is one rank's part of a
        model."""
        raise NotImplementedError(f"{type(self).__name__} is not divided among ranks")

    @abstractmethod
    def slots(self) -> Slots:
        """The layer's checkpoint tensors, named below "model.layers.N."."""


class Model(CausalLM):
    """A model of one of our families."""

    config: ModelConfig
    layer_type: ClassVar[type[Any]]
    """The class of the layers, called with config, index and dtype."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config)
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.layers = nn.ModuleList(self.layer(index, dtype) for index in range(config.depth))
        for module in self.layers.modules():
            if isinstance(module, Linear):
                module.adapted = self.adapted
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype, offset=config.norm_offset)
        self.has_head = config.shard.index == 0
        """Whether this rank computes logits: only the first rank does."""
        self.head = (
            self.embedding
            if config.tie_embeddings or not self.has_head
            else nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        )
        self.packed_head: PackedWeight | None = None
        """The packed head, or None. If it is set, `head` is empty, unless the head is tied to the
        embedding."""
        self.quantised_head: QuantisedWeight | None = None
        """The head quantised for a device, or None. If it is set, `head` is empty, unless the head is tied to
        the embedding."""
        self._quantised_matmul: registry.QuantisedMatMul = quantised_matmul
        self._head_op: registry.Linear = reference.linear
        self._masked_head_op: registry.MaskedLinear | None = None
        self._matmul: registry.MatMul = plain_matmul
        self._soft_cap: registry.SoftCap = reference_logits.soft_cap
        self._add_norm: registry.AddRmsNorm | None = None
        self._head_rows: Rows | None = None
        self.embedding_scale = config.embedding_scale
        ropes = list(dict.fromkeys(config.ropes))
        self.rotations = [rotations(rope, config.head_dim, config.context_length) for rope in ropes]
        """A table (context_length, head_dim / 2), complex64, for each rotary embedding of the layers."""
        self._rotation_of = [ropes.index(rope) for rope in config.ropes]

    def layer(self, index: int, dtype: torch.dtype) -> Layer:
        """Build layer `index`."""
        layer: Layer = self.layer_type(self.config, index, dtype)
        return layer

    def join(self, reduce: Reduce) -> None:
        """Use `reduce` to add the partial results of all ranks from now on. Called if the config is one
        rank's part."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.join(reduce)

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = Residual(self.embed(ids), self._add_norm)
        tables = [table[positions] for table in self.rotations]
        for layer, index in zip(self.layers, self._rotation_of, strict=True):
            layer(x, tables[index], attend)
        return x.normed(self.norm)

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings of `ids`: (T, hidden)."""
        x = F.embedding(ids, self.embedding)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    @torch.inference_mode()
    def forward_through(
        self, ids: Tensor, positions: Tensor, layers: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        """Forward pass with all layers computed by one call: layers(x, rotation) adds their outputs to x in
        place."""
        x = self.embed(ids)
        layers(x, self.rotations[0][positions])
        return self.norm.forward(x)

    def layer_weights(self) -> list[LayerWeights] | None:
        """The packed weights of all layers; None if a layer has none, or if the rotary embeddings of layers
        differ."""
        if len(self.rotations) > 1:
            return None
        found = [layer.weights() for layer in self.layers if isinstance(layer, Layer)]
        weights = [layer for layer in found if layer is not None]
        return weights if len(weights) == len(self.layers) else None

    def use_kernels(self, ops: registry.Ops) -> None:
        self.use_norm(ops.rms_norm, ops.add_rms_norm)
        if ops.linear is not None:
            self.use_linear(ops.linear, ops.layer_linear)
        if ops.masked_linear is not None:
            self.use_masked_linear(ops.masked_linear)
        if ops.silu_mul is not None:
            self.use_activation("silu", ops.silu_mul)
        if ops.gelu_mul is not None:
            self.use_activation("gelu", ops.gelu_mul)
        if ops.matmul is not None:
            self.use_matmul(ops.matmul)
        if ops.quantised_matmul is not None:
            self.use_quantised_matmul(ops.quantised_matmul)
        self._soft_cap = ops.soft_cap
        self.use_experts(ops.mixture, ops.expert_block)

    def use_norm(self, rms_norm: NormOp, add_rms_norm: registry.AddRmsNorm | None = None) -> None:
        """Compute norms with `rms_norm`, and the norm of a sum with `add_rms_norm` if it is given."""
        self._add_norm = add_rms_norm
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.op = rms_norm

    def use_linear(self, linear: registry.Linear, in_layers: registry.Linear | None = None) -> None:
        """Multiply by packed weights with `linear`, and inside layers with `in_layers` if it is given."""
        self._head_op = linear
        for module in self.modules():
            if isinstance(module, Linear):
                module.op = in_layers or linear

    def use_masked_linear(self, masked_linear: registry.MaskedLinear) -> None:
        """Multiply by a packed head with `masked_linear` in `masked_logits`."""
        self._masked_head_op = masked_linear

    def use_activation(self, activation: Activation, op: ActivationOp) -> None:
        """Compute activation(gate) · up with `op`, except where the product with a packed matrix includes
        it."""
        for module in self.modules():
            if isinstance(module, Linear) and module.gate == activation:
                module.activation = op

    def use_matmul(self, matmul: registry.MatMul) -> None:
        """Multiply by unpacked weights with `matmul`."""
        self._matmul = matmul
        for module in self.modules():
            if isinstance(module, Linear | MixtureOfExperts):
                module.matmul = matmul

    def use_quantised_matmul(self, quantised_matmul: registry.QuantisedMatMul) -> None:
        """Multiply by quantised weights on a device with `quantised_matmul`."""
        self._quantised_matmul = quantised_matmul
        for module in self.modules():
            if isinstance(module, Linear):
                module.quantised_matmul = quantised_matmul

    def use_experts(self, mixture: registry.Mixture | None, block: registry.ExpertBlock | None) -> None:
        """Compute mixtures of unpacked experts with `mixture`, and of packed experts with `block`. None
        leaves the present function in place."""
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):
                module.mixture, module.block = mixture or module.mixture, block or module.block

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        if self.quantised_head is not None:
            return self._capped(self._quantised_matmul(hidden, self.quantised_head))
        if self.packed_head is None:
            return self._capped(self._matmul(hidden, self.head))
        out = hidden.new_empty((len(hidden), self.config.vocab_size), dtype=torch.float32)
        return self._capped(self._head_op(hidden, self.packed_head, out=out))

    def _capped(self, logits: Tensor) -> Tensor:
        """Apply the config's logit scale and soft cap in place."""
        scale, cap = self.config.logit_scale, self.config.logit_soft_cap
        if scale != 1.0:
            logits *= scale
        return self._soft_cap(logits, cap) if cap else logits

    @torch.inference_mode()
    def masked_logits(self, hidden: Tensor, mask: Tensor, mask_rows: Tensor) -> Tensor:
        if self.packed_head is None or self._masked_head_op is None:
            return self.logits(hidden)
        return self._capped(self._masked_head_op(hidden, self.packed_head, mask, mask_rows))

    def pack_when_filled(self, form: Callable[[Tensor], Rows] | None) -> None:
        """Pack each matrix of the layers as soon as it is filled. `form` is that of `pack`."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack_when_filled(partial(module.pack, form))

    def lay_out_when_filled(self, form: Callable[[Tensor], Rows] | None, device: torch.device | str) -> None:
        """Move the model to `device`: the matrices of layers once they are filled, all else now. Call before
        filling.

        Matrices that are quantised in the checkpoint stay quantised. Other matrices are quantised by `form`,
        if it is given. Mixtures of experts are dequantised.
        """
        self.rotations = [table.to(device) for table in self.rotations]
        for name, parameter in list(self.named_parameters()):
            if not isinstance(self.get_submodule(name.rpartition(".")[0]), Linear):
                self.put(name, parameter.to(device))
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack_when_filled(partial(module.lay_out, form, device))
            elif isinstance(module, MixtureOfExperts):
                module.keeps = False

    def put(self, name: str, tensor: Tensor) -> None:
        """Replace the parameter `name`. If it is the embedding and the head is tied to it, replace the head
        too."""
        owner, _, attribute = name.rpartition(".")
        parameter = nn.Parameter(tensor, requires_grad=False)
        setattr(self.get_submodule(owner), attribute, parameter)
        if name == "embedding" and (self.config.tie_embeddings or not self.has_head):
            self.head = parameter

    @torch.inference_mode()
    def pack(self, form: Callable[[Tensor], Rows] | None) -> None:
        """Pack all matrices. Matrices that are quantised in the checkpoint are packed as they are, others as
        form(weight).

        Without `form` the others stay unpacked.
        """
        for module in self.modules():
            if isinstance(module, Linear | MixtureOfExperts):
                module.pack(form)
        if not self.has_head:
            self._head_rows = None
            return
        rows = self._head_rows
        if rows is None and form is not None:
            rows = form(self.head)
        if rows is not None:
            self.use_packed_head(pack(rows, inputs=self.config.hidden_size))

    @torch.inference_mode()
    def lay_out_head(self, form: Callable[[Tensor], Rows] | None) -> None:
        """Lay the head out for its device, as `lay_out_when_filled` does for the matrices of layers."""
        rows = self._head_rows
        if rows is None and form is not None and self.has_head:
            rows = form(self.head)
        if rows is not None:
            device = self.embedding.device
            self.quantised_head = lay_out(rows, inputs=self.config.hidden_size, device=device)
        if self.quantised_head is not None:
            self._drop_head()

    def use_packed_head(self, packed: PackedWeight) -> None:
        """Use `packed` in `logits` from now on. The unpacked head is dropped, unless it is tied to the
        embedding."""
        self.packed_head = packed
        self._drop_head()

    def _drop_head(self) -> None:
        self._head_rows = None
        if not self.config.tie_embeddings:
            self.head = nn.Parameter(self.head.new_empty(0), requires_grad=False)

    def name_of(self, stored: str) -> str | None:
        # Old versions of transformers wrote this buffer; the config determines it.
        return None if stored.endswith(".rotary_emb.inv_freq") else stored

    def entries(self, stored: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
        """The tensor `stored` of a checkpoint under its names in `slots`: no entry if it is not needed,
        several if it is fused."""
        name = self.name_of(stored)
        if name is not None:
            yield from expert_entries(name, entry) if self.config.experts is not None else [(name, entry)]

    def slots(self) -> Slots:
        tied = self.config.tie_embeddings
        yield "model.embed_tokens.weight", Slot(self.embedding, keep=self._keep_embedding if tied else None)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            yield from under(f"model.layers.{index}.", layer.slots())
        yield from under("model.norm.", self.norm.slots())
        if self.has_head and not tied:
            yield "lm_head.weight", Slot(self.head, keep=self._keep_head)

    def _keep_head(self, rows: Rows) -> bool:
        self._head_rows = rows
        return True

    def _keep_embedding(self, rows: Rows) -> bool:
        """Keep the quantised rows for the head. Returns False, so that the embedding gets their values as
        well: it looks rows up."""
        self._head_rows = rows
        return False
