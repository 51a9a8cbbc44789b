"""Draft heads: one layer that reads the hidden state of a token and the embedding of the next token, and
proposes the token after that.

    position       0      1      2
    model          a ───▶ b ───▶ c ───▶ ?         h0 h1 h2: its hidden states
    head         h0, b  h1, c  g1, d  g2, e       g1 is the head's own state: it goes on without the model
    proposes       c      d      e      f

The embedding is the model's. For multi-token prediction so is the projection to logits: the layer of
DeepSeek-V3 and GLM-4.5 repeats both tensors in the checkpoint. An EAGLE-3 head has a projection of its own,
which may be to a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ramify.errors import InvalidRequest
from ramify.runtime.model.causal_lm import Attend
from ramify.runtime.model.decoder import Layer, Model
from ramify.runtime.model.experts import Entry
from ramify.runtime.model.families.llama import LlamaLayer
from ramify.runtime.model.families.qwen3 import Glm4Moe
from ramify.runtime.model.families.qwen3_next import GatedAttentionLayer
from ramify.runtime.model.layers import Linear, Residual, RMSNorm, Slot, Slots, under
from ramify.runtime.model.shape.heads import HeadConfig

UNKNOWN = -1e4
"""Logit of a token that an EAGLE-3 head cannot propose. Finite, so that a grammar may allow no other."""


class DraftHead(Model):
    """A draft head. `attach` it to its model before the first pass."""

    config: HeadConfig
    stored: tuple[tuple[str, str | None], ...]
    """(beginning of a tensor's name in the checkpoint, beginning of its name in `slots`); None: not
    needed."""

    def __init__(self, config: HeadConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.hidden_input_width = config.hidden_size
        inputs = len(config.captures) or 2
        self.fc = Linear(
            inputs * self.hidden_input_width, {"fc": self.hidden_input_width}, bias=False, dtype=dtype
        )
        self.fc.adaptable = False
        self._model: tuple[Model, ...] = ()  # in a tuple, so that it is not one of the head's modules

    def attach(self, model: Model) -> None:
        """Let the head read the states of `model`, and use its embedding."""
        self._model = (model,)
        model.captures = self.config.captures

    def embedding_and_head(self, dtype: torch.dtype) -> tuple[nn.Parameter, Linear | None]:
        size = self.config.hidden_size
        embedding = nn.Parameter(torch.empty(0, size, dtype=dtype), requires_grad=False)
        if not self.config.draft_vocab_size:
            return embedding, None
        return embedding, Linear(size, {"lm_head": self.config.draft_vocab_size}, bias=False, dtype=dtype)

    def combine(self, states: Tensor) -> Tensor:
        """`hidden` of `forward`, (T, hidden), by what the model's pass gives: its final states, or the inputs
        of `captures` side by side."""
        return states

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._model[0].embedding)

    def name_of(self, stored: str) -> str | None:
        for theirs, ours in self.stored:
            if stored.startswith(theirs):
                return ours and ours + stored.removeprefix(theirs)
        return None

    def stored_name(self, name: str) -> str:
        begin = ((theirs, ours) for theirs, ours in self.stored if ours and name.startswith(ours))
        theirs, ours = next(begin, ("", ""))
        return theirs + name.removeprefix(ours)

    def slots(self) -> Slots:
        yield from self.fc.slots()
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        yield from under("model.layers.0.", layer.slots())
        yield from under("model.norm.", self.norm.slots())


class PredictionHead(DraftHead):
    """A head for multi-token prediction (MTP): fc(norm(embedding), norm(hidden)), then a layer of the
    family."""

    def __init__(self, config: HeadConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.embedding_norm, self.hidden_norm = (LlamaLayer.norm(config, dtype) for _ in range(2))
        self.stored = (
            ("mtp.fc.", "fc."),
            ("mtp.pre_fc_norm_embedding.", "embedding_norm."),
            ("mtp.pre_fc_norm_hidden.", "hidden_norm."),
            ("mtp.norm.", "model.norm."),
            ("mtp.layers.0.", "model.layers.0."),
        )
        if config.form == "nextn":
            layer = f"model.layers.{config.behind}."
            self.stored = (
                (f"{layer}eh_proj.", "fc."),
                (f"{layer}enorm.", "embedding_norm."),
                (f"{layer}hnorm.", "hidden_norm."),
                (f"{layer}shared_head.norm.", "model.norm."),
                (f"{layer}shared_head.head.", None),
                (f"{layer}embed_tokens.", None),
                (layer, "model.layers.0."),
            )

    def layer(self, index: int, dtype: torch.dtype) -> Layer:
        if self.config.form == "mtp":
            return GatedAttentionLayer(self.config, index, dtype)
        return Glm4Moe.layer(self, index, dtype)  # type: ignore[arg-type]

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, hidden: Tensor | None = None) -> Tensor:
        assert hidden is not None
        both = torch.cat([self.embedding_norm(self.embed(ids)), self.hidden_norm(hidden)], 1)
        x = Residual(self.fc.forward(both), self._add_norm)
        self.layers[0](x, self.rotations[0][positions], attend)
        # DeepSeek's form goes on from the state before the norm, Qwen's from the state behind it.
        return x.value() if self.config.form == "nextn" else x.normed(self.norm)

    def _read(self, hidden: Tensor) -> Tensor:
        return self.norm.forward(hidden) if self.config.form == "nextn" else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model[0].logits(self._read(hidden))

    def masked_logits(self, hidden: Tensor, mask: Tensor, mask_rows: Tensor) -> Tensor:
        return self._model[0].masked_logits(self._read(hidden), mask, mask_rows)

    def slots(self) -> Slots:
        yield from super().slots()
        yield from under("embedding_norm.", self.embedding_norm.slots())
        yield from under("hidden_norm.", self.hidden_norm.slots())


class Eagle3Layer(LlamaLayer):
    """A Llama layer whose attention reads the normed embedding and the normed hidden state, side by side."""

    def __init__(self, config: HeadConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__(config, index, dtype)
        qkv = self.qkv
        self.qkv = Linear(
            2 * config.hidden_size, qkv.parts, bias=config.qkv_bias, dtype=dtype, rotary=qkv.rotary
        )
        self.hidden_norm = self.norm(config, dtype)
        self.norm_first = config.norm_before_residual

    def residual(self, embedding: Tensor, hidden: Tensor, rotation: Tensor, attend: Attend) -> Residual:
        """The residual stream behind the layer."""
        normed = self.hidden_norm(hidden)
        qkv = self.qkv.forward(torch.cat([self.attention_norm(embedding), normed], 1))
        x = Residual(normed if self.norm_first else hidden.clone())
        self.output.add_to(x, self.mixed(qkv, rotation, attend))
        self.mlp.add_to(x, self.mlp_norm)
        return x

    def norms(self) -> dict[str, RMSNorm]:
        return super().norms() | {"hidden_norm": self.hidden_norm}


class Eagle3Head(DraftHead):
    layer_type = Eagle3Layer
    stored = (
        ("midlayer.", "model.layers.0."),
        ("layers.0.", "model.layers.0."),
        ("norm.", "model.norm."),
        ("fc.", "fc."),
        ("lm_head.", "lm_head."),
        ("d2t", "d2t"),
    )

    def __init__(self, config: HeadConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.d2t: nn.Parameter | None = None
        """For each token of the head, its distance to the same token of the model: (draft_vocab_size,)."""
        if config.draft_vocab_size < config.vocab_size:
            distances = torch.zeros(config.draft_vocab_size, dtype=torch.float32)
            self.d2t = nn.Parameter(distances, requires_grad=False)
        self._tokens: Tensor | None = None
        """The model's token for each token of the head: (draft_vocab_size,) int64, from `attach` on."""

    def attach(self, model: Model) -> None:
        """Raises `InvalidRequest` if `d2t` names a token that the model does not have."""
        super().attach(model)
        if self.d2t is None:
            return
        self._tokens = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t.long()
        least, most = (int(bound) for bound in torch.aminmax(self._tokens))
        if least < 0 or most >= self.config.vocab_size:
            raise InvalidRequest(
                f"The draft head's d2t names tokens {least} to {most}, and the model has "
                f"{self.config.vocab_size} tokens.",
                field="draft_model",
                remedy="Choose an EAGLE-3 head that was trained for this model.",
            )

    def combine(self, states: Tensor) -> Tensor:
        return self.fc.forward(states)

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, hidden: Tensor | None = None) -> Tensor:
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        assert hidden is not None
        return layer.residual(self.embed(ids), hidden, self.rotations[0][positions], attend).value()

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        found = super().logits(self.norm.forward(hidden))
        if self._tokens is None:
            return found
        logits = found.new_full((len(found), self.config.vocab_size), UNKNOWN)
        return logits.index_copy_(1, self._tokens, found)

    def masked_logits(self, hidden: Tensor, mask: Tensor, mask_rows: Tensor) -> Tensor:
        return self.logits(hidden)

    def name_of(self, stored: str) -> str | None:
        name = super().name_of(stored.removeprefix("model."))
        return None if name == "d2t" and self.d2t is None else name

    def entries(self, stored: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
        for name, each in super().entries(stored, entry):
            # int64 in the file; the distances are exact in float32, as vocabularies are below 2^24.
            yield name, each.float() if name == "d2t" and isinstance(each, Tensor) else each

    def slots(self) -> Slots:
        yield from super().slots()
        assert self.head is not None
        yield from self.head.slots()
        if self.d2t is not None:
            yield "d2t", Slot(self.d2t)


def head_of(config: HeadConfig) -> type[DraftHead]:
    return Eagle3Head if config.form == "eagle3" else PredictionHead
