"""The state of linear attention layers, which takes the place of a sequence's keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

NUMBER_BYTES = 4
"""Bytes of a number in a state: float32. The recurrent state sums over all tokens, and bfloat16 would lose
the small terms. The convolution's state is float32 as well, since it is only 2% to 5% of a slot."""


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """The state of one sequence in all gated delta-net layers of a model (arXiv 2412.06464).

    A slot holds the state of one sequence, in two float32 tensors for each layer:

    conv : (channels, width - 1)
        The last inputs of the causal convolution, the newest last.
    recurrent : (heads, key_dim, value_dim)
        The sum of outer products of keys and values, decayed and corrected by the delta rule.

    A state belongs to one position: the number of tokens that it has seen. A step of n tokens of a sequence
    reads the slot before the first and writes it after the last token, so the slot then belongs to a position
    n higher, and no earlier position can be read from it:

    - A step may process any number of tokens of a sequence. How a prompt is cut into steps does not change
      the state: on the CPU not by a bit.
    - The sequences of a step must have distinct slots. Sequences that go on from one state, as the branches
      of a tree of choices, need a copy each. Copies are made before the step.
    - A sequence whose first token in the step is at position 0 starts from zeros, whatever its slot holds. A
      new slot need not be cleared.
    - Draft tokens change the state too. To take a step back, copy the slot before it, and compute the tokens
      that were accepted again from the copy.
    - A slot that belongs to no sequence of the step is neither read nor written.
    """

    layers: int
    """Number of gated delta-net layers in the model. They are numbered from 0, independently of the layers
    with KV pages."""
    channels: int
    """Channels of the convolution: queries and keys of all key heads, values of all heads."""
    width: int
    """Tokens that the convolution sees, the current one included."""
    heads: int
    """Value heads. A key head may serve several."""
    key_dim: int
    value_dim: int

    @property
    def conv(self) -> tuple[int, int]:
        """The shape of one layer's convolution state."""
        return self.channels, self.width - 1

    @property
    def recurrent(self) -> tuple[int, int, int]:
        """The shape of one layer's recurrent state."""
        return self.heads, self.key_dim, self.value_dim

    @property
    def key_heads(self) -> int:
        return (self.channels - self.heads * self.value_dim) // (2 * self.key_dim)

    @property
    def bytes(self) -> int:
        """Bytes of one slot, all layers together."""
        return NUMBER_BYTES * self.layers * (math.prod(self.conv) + math.prod(self.recurrent))
