"""The shape of a model, whichever file it is read from (`hf_config`, `gguf.config`). Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.kernels.weights.routing import ClampedGate, Routing
from ramify.runtime.model.shape.quantised_config import Quantised

Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "olmo2", "granite",
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared", "glm4_moe", "gpt_oss",
    "qwen3_next", "qwen3_5", "qwen3_5_moe",
]  # fmt: skip
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors"]
BY_LENGTH: tuple[RopeKind, ...] = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies depend on the length of a request."""
Activation = Literal["silu", "gelu"]
"""Activations of gated MLPs. gelu is approximated with tanh (arXiv 1606.08415)."""

Name = TypeVar("Name", bound=str)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and its extension to long contexts.

    Kinds of extension. default: none. linear: positions divided by `factor` (arXiv 2306.15595). llama3: low
    frequencies divided by `factor`, with a ramp to the high ones (Llama 3.1 reference code). yarn: arXiv
    2309.00071. factors: a divisor for each frequency, in `factors` (the `rope_freqs` tensor of GGUF files).
    longrope: as factors, but with `long_factors` if the context is longer than the original one (arXiv
    2402.13753). dynamic: as default up to the original context length; beyond it the frequencies change with
    the length of the request.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    share: float = 1.0
    """The share of a head's elements that rotate, from the first on; 0: no positions are embedded."""
    factor: float = 1.0
    original_context_length: int = 0
    """llama3, yarn, longrope, dynamic: the context length of the training before the extension, in tokens."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: round the borders of the ramp to whole dimensions."""
    attention_factor: float | None = None
    """yarn, longrope: multiplies cos and sin. None: 0.1 ln(factor) + 1 for yarn, sqrt(1 + ln(factor) /
    ln(original_context_length)) for longrope."""
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def rotated(self, head_dim: int) -> int:
        """Number of elements of a head that rotate."""
        return int(head_dim * self.share)


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
    """Number of value heads. Several value heads may share a key head."""
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


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model's properties for the executor and the scheduler. Sizes are in elements, lengths in tokens."""

    family: str
    vocab_size: int
    num_layers: int
    """Layers that keep keys and values."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    windows: tuple[int, ...]
    """Sliding window of each layer: the number of visible tokens, the current one included; 0: all."""
    attention_scale: float | None = None
    """Factor of attention scores; None: 1 / sqrt(head_dim)."""
    attention_soft_cap: float = 0.0
    """Attention scores become cap · tanh(score / cap); 0: no cap."""
    sinks: tuple[bool, ...] = ()
    """For each layer, whether its heads have attention sinks: scores that join every softmax. Empty: no layer
    has any."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    states: StateShape | None = None
    """The shape of the states that linear attention layers keep; None without linear attention layers."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise invalid(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise invalid(f"head_dim is {self.head_dim}; rotary embedding needs an even number")
        if len(self.windows) != self.num_layers:
            raise invalid(f"{len(self.windows)} attention windows for {self.num_layers} layers")

    @property
    def rope_kinds(self) -> Mapping[RopeKind, int]:
        """Each kind of rotary embedding → the shortest original context of that kind; empty without rotary
        embeddings."""
        return {}

    @property
    def default_context_length(self) -> int:
        """The longest context in which no rotation depends on the length of a request.

        With longrope and dynamic, transformers takes other frequencies for all tokens of a request once the
        request is longer than the original context. Cached keys cannot follow: they are rotated already.
        """
        borders = [length for kind, length in self.rope_kinds.items() if kind in BY_LENGTH]
        return min([self.context_length, *borders])

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def sliding_window(self) -> int:
        """The widest window of all layers; no layer needs older keys. 0 if a layer sees all tokens."""
        return 0 if 0 in self.windows else max(self.windows)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts that some layers have in place of an MLP (arXiv 1701.06538, 2401.04088)."""

    count: int
    size: int
    """Intermediate size of one expert: the outputs of its gate projection, and of its up projection."""
    routing: Routing
    sparse: tuple[bool, ...]
    """For each layer, whether it has the mixture. The other layers have an MLP."""
    shared_size: int = 0
    """Intermediate size of the shared expert, which every token uses; 0: none."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by a gate, which is computed from the token."""
    correction: bool = False
    """Whether a bias is added to the scores that choose experts (arXiv 2408.15664)."""
    router_bias: bool = False
    bias: bool = False
    """Whether experts' matrices have biases."""
    clamp: ClampedGate | None = None
    """The activation of experts, if it is not SwiGLU."""

    def __post_init__(self) -> None:
        count, top_k = self.count, self.routing.top_k
        groups, top_groups = self.routing.groups, self.routing.top_groups
        if not 0 < top_k <= count:
            raise invalid(f"top_k is {top_k} of {count} experts")
        if groups < 1 or count % groups or (groups > 1 and count // groups < 2):
            raise invalid(f"{count} experts cannot be in {groups} groups of equal size, of two or more")
        if groups > 1 and not 0 < top_groups <= groups:
            raise invalid(f"{top_groups} of {groups} groups of experts are to be chosen")
        if groups > 1 and top_groups * (count // groups) < top_k:
            raise invalid(f"{top_groups} groups of {count // groups} experts hold fewer than {top_k}")


@dataclass(frozen=True)
class Shard:
    """The part of a model that one of `count` ranks holds (tensor parallelism)."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """The shape of a decoder-only transformer of one of our families."""

    family: Family
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    rope: Rope = Rope()
    layer_ropes: tuple[Rope, ...] = ()
    """The rotary embedding of each layer, if they differ; else empty."""
    logit_soft_cap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    linear: tuple[bool, ...] = ()
    """For each layer, whether it is a gated delta-net layer, which keeps a state. Empty if none is."""
    activation: Activation = "silu"
    norm_offset: float = 0.0
    """Number that is added to the stored weights of norms."""
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """Whether query and key heads have norms. Set in families that have models with and without such
    norms."""
    experts: Experts | None = None
    quantised: Quantised | None = None
    """Quantisation of a checkpoint folder. None for unquantised folders, and for GGUF files, where each
    tensor has its own type."""
    shard: Shard = Shard()
    """The rank whose part of the model this is. `num_heads`, `num_kv_heads` and `intermediate_size` are those
    of the part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linear and (len(self.linear), sum(self.linear)) != (self.depth, self.depth - self.num_layers):
            raise invalid(f"{sum(self.linear)} of {len(self.linear)} layers are linear, of {self.depth}")
        if len(self.layer_ropes) not in (0, self.num_layers):
            raise invalid(f"{len(self.layer_ropes)} rotary embeddings for {self.num_layers} layers")
        if self.experts and len(self.experts.sparse) != self.depth:
            raise invalid(f"{len(self.experts.sparse)} of {self.depth} layers say if they are sparse")
        if self.rope.rotated(self.head_dim) % 2:
            raise invalid(f"{self.rope.rotated(self.head_dim)} numbers of a head rotate; they must be pairs")

    @property
    def depth(self) -> int:
        """Number of all layers: those with KV pages and those with states."""
        return self.num_layers + (0 if self.states is None else self.states.layers)

    def layers_with_pages(self, before: int) -> int:
        """Number of layers with KV pages among the first `before` layers."""
        return before - sum(self.linear[:before])

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embedding of every layer."""
        return self.layer_ropes or (self.rope,) * self.depth

    @property
    def rope_kinds(self) -> Mapping[RopeKind, int]:
        ropes = sorted({self.rope, *self.layer_ropes}, key=lambda rope: -rope.original_context_length)
        return {rope.kind: rope.original_context_length for rope in ropes if rope.share}


def gemma_shape(hidden_size: int, query_scalar: float) -> dict[str, Any]:
    """The fields that all Gemma models share."""
    return {
        "attention_scale": query_scalar**-0.5,
        "embedding_scale": hidden_size**0.5,
        "activation": "gelu",
        "norm_offset": 1.0,
    }


def granite_shape(
    eps: float, *, residual: float, attention: float, embedding: float, logits: float
) -> dict[str, Any]:
    """The fields of Granite's multipliers.

    Granite adds m · f(norm(x)) to the residual stream x. Here the stream is x / m, so that a layer adds
    f(norm(x)). norm(x / m) equals norm(x) if the norm's epsilon is divided by m².
    """
    return {
        "attention_scale": attention,
        "embedding_scale": embedding / residual,
        "norm_eps": eps / residual**2,
        "logit_scale": 1.0 / logits,
    }


def delta_shape(
    linear: Sequence[bool], *, key_heads: int, heads: int, key_dim: int, value_dim: int, width: int
) -> dict[str, Any]:
    """The fields of a hybrid: a model in which some layers are gated delta-net layers.

    linear : for each layer, whether it is a gated delta-net layer
    heads : value heads
    width : tokens that the convolution sees
    """
    if all(linear) or not any(linear):
        raise unsupported(
            "layer_types", linear[0], "linear_attention in some layers, full_attention in others"
        )
    for name, size in (("linear_key_head_dim", key_dim), ("linear_value_head_dim", value_dim)):
        if size % 16:
            raise unsupported(name, size, "a multiple of 16")
    if heads % key_heads:
        raise invalid(f"{heads} value heads cannot share {key_heads} key heads")
    layers = len(linear) - sum(linear)
    return {
        "linear": tuple(linear),
        "num_layers": layers,
        "windows": (0,) * layers,
        "states": StateShape(
            layers=sum(linear),
            channels=2 * key_heads * key_dim + heads * value_dim,
            width=width,
            heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
        ),
    }


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(dict.fromkeys(value))


def one_of(names: Sequence[Name], field: str, found: object) -> Name:
    for name in names:
        if name == found:
            return name
    raise unsupported(field, found, f"one of {', '.join(names)}")


INCONSISTENT = "This model's configuration is inconsistent: "


def invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(f"{INCONSISTENT}{reason}.", field="model")


def unsupported(field: str, value: object, wanted: str) -> UnsupportedField:
    return UnsupportedField(
        f"This model needs {field} = {value!r}, which is not implemented.",
        field=field,
        remedy=f"Choose a model whose {field} is {wanted}.",
    )


def part_of(config: ModelConfig, index: int, count: int) -> ModelConfig:
    """The config of a rank's part. `parallel.checks` ensures that every divided size is divisible."""
    return replace(
        config,
        num_heads=config.num_heads // count,
        num_kv_heads=config.num_kv_heads // count,
        intermediate_size=config.intermediate_size // count,
        shard=Shard(index, count),
    )
