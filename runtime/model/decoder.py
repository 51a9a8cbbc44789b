"""Models of our own families without their layers: embedding, final norm, head. The executor owns the KV
pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ramify.kernels import registry
from ramify.kernels.reference import logits as reference_logits
from ramify.kernels.weights.rows import Rows
from ramify.kernels.weights.stack import LayerWeights
from ramify.runtime.model.causal_lm import Attend, CausalLM
from ramify.runtime.model.experts import Entry, MixtureOfExperts, expert_entries
from ramify.runtime.model.layers import Linear, Reduce, Residual, RMSNorm, Slot, Slots, under
from ramify.runtime.model.rope import rotations
from ramify.runtime.model.shape.config import ModelConfig


class Layer(nn.Module, ABC):
    """One transformer layer."""

    @abstractmethod
    def forward(self, x: Residual, rotation: Tensor, attend: Attend) -> None:
        """Add the layer's output to x. rotation: (T, head_dim / 2) complex64."""

    def use_kernels(self, ops: registry.Ops) -> None:
        """Use the kernels `ops` for all operations outside the modules of `layers` and `experts`."""

    def weights(self) -> LayerWeights | None:
        """Packed weights for a kernel that computes whole layers. None if a matrix is not packed, or the
        layer is not of the form that `LayerWeights` describes."""
        return None

    def join(self, reduce: Reduce) -> None:
        """Use `reduce` to sum the ranks' partial results. Called if the model is one rank's part."""
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
        self.embedding, self.head = self.embedding_and_head(dtype)
        self.layers = nn.ModuleList(self.layer(index, dtype) for index in range(config.depth))
        for module in self.layers.modules():
            if isinstance(module, Linear):
                module.adapted = self.adapted
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype, offset=config.norm_offset)
        self._masked_linear: registry.MaskedLinear | None = None
        self._soft_cap: registry.SoftCap = reference_logits.soft_cap
        self._add_norm: registry.AddRmsNorm | None = None
        self.embedding_scale = config.embedding_scale
        ropes = list(dict.fromkeys(config.ropes))
        self.rotations = [rotations(rope, config.head_dim, config.context_length) for rope in ropes]
        """A table (context_length, head_dim / 2), complex64, for each rotary embedding of the layers."""
        self._rotation_of = [ropes.index(rope) for rope in config.ropes]

    def embedding_and_head(self, dtype: torch.dtype) -> tuple[nn.Parameter, Linear | None]:
        """The embedding, and the projection to logits, None on all ranks but the first."""
        config = self.config
        shape = (config.vocab_size, config.hidden_size)
        embedding = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        if config.shard.index:
            return embedding, None
        weight = embedding if config.tie_embeddings else None
        head = Linear(shape[1], {"lm_head": shape[0]}, bias=False, dtype=dtype, weight=weight)
        head.adaptable = False
        return embedding, head

    def layer(self, index: int, dtype: torch.dtype) -> Layer:
        layer: Layer = self.layer_type(self.config, index, dtype)
        return layer

    def join(self, reduce: Reduce) -> None:
        """Use `reduce` to sum the ranks' partial results. Called if the model is one rank's part."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.join(reduce)

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, hidden: Tensor | None = None) -> Tensor:
        x = Residual(self.embed(ids), self._add_norm)
        tables = [table[positions] for table in self.rotations]
        captured = []
        for place, (layer, index) in enumerate(zip(self.layers, self._rotation_of, strict=True)):
            if place in self.captures:
                captured.append(x.value().clone())
            layer(x, tables[index], attend)
        return _beside(x.normed(self.norm), captured)

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings of `ids`: (T, hidden)."""
        x = F.embedding(ids, self.embedding)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    @torch.inference_mode()
    def forward_through(
        self, ids: Tensor, positions: Tensor, parts: Sequence[Callable[[Tensor, Tensor], None]]
    ) -> Tensor:
        """Forward pass with one call for many layers: each of `parts` adds the outputs of its layers to x in
        place, called with x and rotation. A part ends before each of `captures`."""
        x, captured = self.embed(ids), []
        rotation = self.rotations[0][positions]
        for place, part in enumerate(parts):
            if place:
                captured.append(x.clone())
            part(x, rotation)
        return _beside(self.norm.forward(x), captured)

    def layer_weights(self) -> list[LayerWeights] | None:
        """The packed weights of all layers; None if a layer has none or the rotary embeddings differ."""
        if len(self.rotations) > 1:
            return None
        found = [layer.weights() for layer in self.layers if isinstance(layer, Layer)]
        weights = [layer for layer in found if layer is not None]
        return weights if len(weights) == len(self.layers) else None

    def use_kernels(self, ops: registry.Ops) -> None:
        self._add_norm, self._soft_cap = ops.add_rms_norm, ops.soft_cap
        self._masked_linear, self.adapted.op = ops.masked_linear, ops.lora
        for module in self.modules():
            if isinstance(module, RMSNorm | Linear | MixtureOfExperts | Layer):
                module.use_kernels(ops)
        if self.head is not None and ops.linear is not None:
            self.head.op = ops.linear

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        assert self.head is not None
        if not self.head.packed:
            return self._capped(self.head.forward(hidden))
        rows = sum(self.head.parts.values())
        out = hidden.new_empty((len(hidden), rows), dtype=torch.float32)
        return self._capped(self.head.op(hidden, self.head.packed[0], out=out))

    def _capped(self, logits: Tensor) -> Tensor:
        scale, cap = self.config.logit_scale, self.config.logit_soft_cap
        if scale != 1.0:
            logits *= scale
        return self._soft_cap(logits, cap) if cap else logits

    @torch.inference_mode()
    def masked_logits(self, hidden: Tensor, mask: Tensor, mask_rows: Tensor) -> Tensor:
        if self._masked_linear is None or self.head is None or not self.head.packed:
            return self.logits(hidden)
        return self._capped(self._masked_linear(hidden, self.head.packed[0], mask, mask_rows))

    def pack_when_filled(self, form: Callable[[Tensor], Rows] | None) -> None:
        """Pack each matrix, except those of routed experts, once it is filled. `form`: see `pack`."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack_when_filled(partial(module.pack, form))

    def lay_out_when_filled(self, form: Callable[[Tensor], Rows] | None, device: torch.device | str) -> None:
        """Move the model to `device`: each matrix once it is filled, all else now. Call before filling.

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
        """Replace the parameter `name`. For the embedding, also replace the weight of a head tied to it."""
        owner, _, attribute = name.rpartition(".")
        parameter = nn.Parameter(tensor, requires_grad=False)
        setattr(self.get_submodule(owner), attribute, parameter)
        if name == "embedding" and self.head is not None and self.config.tie_embeddings:
            self.head.weight = parameter

    @torch.inference_mode()
    def pack(self, form: Callable[[Tensor], Rows] | None) -> None:
        """Pack all matrices: those quantised in the checkpoint as they are, all others as form(weight).

        If `form` is None, matrices that are not quantised in the checkpoint stay unpacked.
        """
        for module in self.modules():
            if isinstance(module, Linear | MixtureOfExperts):
                module.pack(form)

    def name_of(self, stored: str) -> str | None:
        # Old versions of transformers wrote this buffer; the config determines it.
        return None if stored.endswith(".rotary_emb.inv_freq") else stored

    def entries(self, stored: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
        """(name in `slots`, tensor) for the checkpoint's tensor `stored`: no entry if the tensor is not
        needed, several if it is fused."""
        name = self.name_of(stored)
        if name is not None:
            yield from expert_entries(name, entry) if self.config.experts is not None else [(name, entry)]

    def stored_name(self, name: str) -> str:
        """The name in the checkpoint of the tensor `name` of `slots`."""
        return name

    def slots(self) -> Slots:
        embedding = Slot(self.embedding)
        if self.head is not None and self.config.tie_embeddings:
            filled = partial(self.head.mark_filled, "lm_head.weight")
            embedding = Slot(self.embedding, keep=self._keep_for_head, filled=filled)
        yield "model.embed_tokens.weight", embedding
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            yield from under(f"model.layers.{index}.", layer.slots())
        yield from under("model.norm.", self.norm.slots())
        if self.head is not None and not self.config.tie_embeddings:
            yield from self.head.slots()

    def _keep_for_head(self, rows: Rows) -> bool:
        """Keep the quantised rows for the head. Returns False, so that their dequantised values also fill the
        embedding, which looks rows up."""
        assert self.head is not None
        self.head.keep_rows("lm_head", rows)
        return False


def _beside(hidden: Tensor, captured: Sequence[Tensor]) -> Tensor:
    return torch.cat([hidden, *captured], 1) if captured else hidden
