"""The shape of a draft head: a model of one layer, which reads the hidden states of another model. Imports no
torch.

    form    files                                                    reads
    nextn   DeepSeek-V3, GLM-4.5: the layer behind the model's last  final states   (arXiv 2412.19437)
    mtp     Qwen3-Next, Qwen3.5: tensors named `mtp.`                final states
    eagle3  a folder of its own                                      three layers   (arXiv 2503.01840)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ramify.errors import UnsupportedField
from ramify.runtime.model.shape.config import ModelConfig, ModelShape
from ramify.runtime.model.shape.hf_config import config_from_hf, read_json

HeadForm = Literal["nextn", "mtp", "eagle3"]


@dataclass(frozen=True, kw_only=True)
class HeadConfig(ModelConfig):
    """The shape of a draft head. Vocabulary, context and hidden size are those of its model."""

    form: HeadForm
    behind: int
    """Number of layers of the head's model."""
    captures: tuple[int, ...] = ()
    """The layers of the model whose inputs the head reads, ascending. Empty: it reads the model's final
    states, after the last norm."""
    draft_vocab_size: int = 0
    """Number of tokens that the head can propose. 0: all, by the model's own head."""
    norm_before_residual: bool = False
    """eagle3: whether the residual stream begins with the normed hidden state."""

    @property
    def stored_at(self) -> str:
        """Beginning of the names of the head's tensors in the model's checkpoint."""
        return {"nextn": f"model.layers.{self.behind}.", "mtp": "mtp.", "eagle3": ""}[self.form]


FORMS: Mapping[str, HeadForm] = {
    "glm4_moe": "nextn",
    "qwen3_next": "mtp",
    "qwen3_5": "mtp",
    "qwen3_5_moe": "mtp",
}
"""The form of the heads that a family's checkpoints hold."""


def own_head(shape: ModelShape, tensor_names: Callable[[], Collection[str]]) -> HeadConfig | None:
    """The first draft head for multi-token prediction in the checkpoint of a model of `shape`; None if there
    is none.

    tensor_names : returns the names of the checkpoint's tensors
    """
    form = FORMS.get(shape.family)
    if form is None or not isinstance(shape, ModelConfig):
        return None
    projection, layer = "mtp.fc.", "mtp.layers.0."
    if form == "nextn":
        layer = f"model.layers.{shape.depth}."
        projection = f"{layer}eh_proj."
    names = tensor_names()
    if not any(name.startswith(projection) for name in names):
        return None
    sparse = any(name.startswith(f"{layer}mlp.experts.") for name in names)
    experts = dataclasses.replace(shape.experts, sparse=(True,)) if shape.experts and sparse else None
    return _head(shape, shape, form=form, experts=experts)


def is_loaded(name: str, shape: ModelShape, head: HeadConfig | None) -> bool:
    """Whether the tensor `name` of a checkpoint is loaded with the draft head `head`: all but those of other
    heads, and of embeddings that a head repeats."""
    if not isinstance(shape, ModelConfig):
        return True
    form = FORMS.get(shape.family)
    if form == "mtp":
        return head is not None or not name.startswith("mtp.")
    found = re.match(r"model\.layers\.(\d+)\.", name) if form == "nextn" else None
    if found is None or int(found[1]) < shape.depth:
        return True
    repeated = name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
    return head is not None and name.startswith(head.stored_at) and not repeated


def eagle3_head(folder: Path, name: str, shape: ModelShape) -> HeadConfig:
    """The EAGLE-3 head in `folder`, in the form of SafeAILab and SpecForge or in that of speculators.

    name : the folder's name for messages

    Raises `UnsupportedField` if it is no head for a model of `shape`.
    """
    if not isinstance(shape, ModelConfig):
        raise _unfit(name, f"reads layers of its model, and {shape.family} is computed by transformers' code")
    outer = read_json(folder / "config.json")
    given: dict[str, Any] = {**outer, **(outer.get("transformer_layer_config") or {})}
    if given.get("num_hidden_layers", 1) != 1:
        raise _unfit(name, f"has {given['num_hidden_layers']} layers, and 1 is supported")
    for field, ours, theirs in (
        ("hidden size", shape.hidden_size, given.get("target_hidden_size") or given.get("hidden_size")),
        ("hidden size", shape.hidden_size, given.get("hidden_size")),
        ("vocabulary", shape.vocab_size, given.get("vocab_size")),
    ):
        if ours != theirs:
            raise _unfit(name, f"is for a model whose {field} is {theirs}, and the model's is {ours}")
    tokens = outer.get("draft_vocab_size")
    tokens = shape.vocab_size if tokens is None else tokens
    if not 0 < tokens <= shape.vocab_size:
        raise _unfit(name, f"has a draft_vocab_size of {tokens}, and the model {shape.vocab_size} tokens")
    captures = _captures(outer, shape.depth)
    if len(captures) != 3 or not 0 < captures[0] < captures[1] < captures[2] < shape.depth:
        raise _unfit(name, f"reads the inputs of layers {captures}, and the model has {shape.depth} layers")
    neutral = {"model_type": "llama", "architectures": None, "num_hidden_layers": 1}
    config = config_from_hf({**given, **neutral, "max_position_embeddings": shape.context_length})
    return _head(
        config,
        shape,
        form="eagle3",
        captures=tuple(captures),
        draft_vocab_size=tokens,
        norm_before_residual=bool(outer.get("norm_before_residual")),
    )


def _captures(config: Mapping[str, Any], depth: int) -> list[int]:
    """The layers whose inputs the head reads. Layer ids in `eagle_config` name layers by their outputs."""
    of_outputs = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if of_outputs:
        return [int(layer) + 1 for layer in of_outputs]
    found = config.get("eagle_aux_hidden_state_layer_ids")
    return [int(layer) for layer in found] if found else [2, depth // 2, depth - 3]


def _head(config: ModelConfig, shape: ModelConfig, **more: Any) -> HeadConfig:
    """A head whose layer has the sizes of `config`, for a model of `shape`."""
    fields = {each.name: getattr(config, each.name) for each in dataclasses.fields(ModelConfig)}
    fields |= {
        "num_layers": 1,
        "windows": (0,),
        "linear": (),
        "states": None,
        "layer_ropes": (),
        "sinks": (),
        "tie_embeddings": False,
        "vocab_size": shape.vocab_size,
        "context_length": shape.context_length,
        "eos_token_ids": shape.eos_token_ids,
        "bos_token_id": shape.bos_token_id,
        "behind": shape.depth,
    }
    return HeadConfig(**fields | more)


def _unfit(name: str, reason: str) -> UnsupportedField:
    return UnsupportedField(
        f"draft_model {name!r} {reason}.",
        field="draft_model",
        remedy="Choose an EAGLE-3 head that was trained for this model.",
    )
