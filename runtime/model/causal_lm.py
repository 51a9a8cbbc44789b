"""The protocol of models that the executor runs: decoder-only, with attention passed in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor, nn

from ramify.errors import UnsupportedField
from ramify.kernels.arguments.gated_delta import DeltaWeights
from ramify.kernels.registry import Ops
from ramify.runtime.model.layers import Adapted, HeadNorms, Slots
from ramify.runtime.model.shape.config import ModelShape


class Attend(Protocol):
    """The operations in which the tokens of a request see each other: attention of one layer over all earlier
    tokens, and the gated delta rule of a layer with a recurrent state. The caller of `CausalLM.forward`
    supplies them."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Tensor,
        *,
        window: int = 0,
        norms: HeadNorms | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Rotate q and k, store k and v, and return softmax(scale · q kᵀ) v under the causal mask. The scale
        and the soft cap of scores are the config's.

        q: (T, heads, head_dim); k, v: (T, kv_heads, head_dim); all in the model's dtype, q and k not rotated
        yet. q, k and v may be views of one buffer: their last two dimensions are contiguous, the stride
        between tokens may be larger. q and k may be changed in place. The caller overwrites all three after
        the call.
        rotation: (T, head_dim / 2) complex64: elements 2i and 2i + 1 of a head are the real and the
        imaginary part of a complex number, which ``rotation[t, i]`` multiplies (`rope.rotate_`).
        window: number of tokens that a token sees, itself included; 0 means all.
        norms: applied to the heads of q and k before the rotation.
        sinks: (heads,) float32, one more score in the softmax of each head, without a value
        (`paged_attention`). Given for layers for which the config's `sinks` is true.
        Returns (T, heads, head_dim), in the same dtype.
        """
        ...

    def gated_delta_rule(
        self, layer: int, qkv: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights
    ) -> Tensor:
        """The gated delta rule of one layer (`kernels.reference.gated_delta`), on the requests' states.

        layer: index among the layers with states, from 0. (`__call__` numbers the layers with pages.)
        qkv: (T, channels); b, a: (T, heads). qkv, b and a may be views of one buffer, with contiguous rows.
        Returns (T, heads, value_dim), in the same dtype.
        """
        ...


class CausalLM(nn.Module, ABC):
    """A decoder-only transformer for inference. A batch is ragged and packed: T tokens of any requests."""

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.config = config
        self.adapted = Adapted()
        """The LoRA adapters of a step."""
        self.captures: tuple[int, ...] = ()
        """The layers whose inputs `forward` returns too, for a draft head; ascending."""
        self.hidden_input_width = 0
        """Size of the hidden states that `forward` takes beside the ids; 0 except for draft heads."""

    @abstractmethod
    def use_kernels(self, ops: Ops) -> None:
        """Compute with the kernels `ops` from now on.

        Raises `UnsupportedField` if `ops` are deterministic kernels and the model cannot be deterministic.
        """

    @abstractmethod
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, hidden: Tensor | None = None) -> Tensor:
        """Hidden states for `logits`, (T, hidden); behind them, with `captures`, the inputs of these layers:
        (T, (1 + captures) · hidden).

        ids, positions: (T,) int64; a position is the token's index in its own request.
        hidden: (T, `reads`), for draft heads: the hidden state of the token before each
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits: (R, hidden) → (R, vocab); float32 from a packed head, else the dtype of `hidden`."""

    def slots(self) -> Slots:
        """The checkpoint's tensors with their slots, for loading LoRA adapters.

        Raises `UnsupportedField` for a model that takes no LoRA adapters.
        """
        raise UnsupportedField(
            "This model's code is transformers', and LoRA adapters need a model of our own families.",
            field="lora",
            remedy="Merge the adapter into the checkpoint.",
        )

    def name_of(self, stored: str) -> str | None:
        """The name in `slots` of the checkpoint's tensor `stored`; None for a tensor that is not needed."""
        return stored

    def masked_logits(self, hidden: Tensor, mask: Tensor, mask_rows: Tensor) -> Tensor:
        """Logits under masks: the logits of tokens that a row's mask forbids may be minus infinity.

        mask: (M, ceil(vocab / 32)) int32 bitmasks of the allowed tokens.
        mask_rows: (R,) int32, the row of `mask` for each row of `hidden`; below 0: all tokens are allowed.
        """
        return self.logits(hidden)
