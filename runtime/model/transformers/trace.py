"""Runs a model's code once on the meta device, without weights, and records what it asks of attention.

Example, a Gemma 2 of two layers: its code calls attention twice, with 4 heads of 16 numbers, 2 key-value
heads, a scale of 1/16 and a soft cap of 50; the first call with a window of 4096 tokens. Call number n has
layer n of the KV pages, whichever module makes it: a module that is run twice has two layers of pages.

Keys and values are all that a prefix leaves behind. So tokens may be joined by attention alone, and attention
must be causal. Any other operation that joins tokens of a batch is refused, and the refusal names the
operation.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ramify.errors import InvalidRequest, RamifyError, UnsupportedField
from ramify.runtime.model.shape.config import ModelShape, RopeKind, token_ids
from ramify.runtime.model.shape.hf_rope import rope_from_hf, with_rope_scaling
from ramify.runtime.model.transformers.hooks import NAME, calling

TOKENS = 1013
"""Tokens of the traced batch: a prime that is no size of a model, so that its length identifies the token
dimension."""
ROWS = 7
"""Rows of the traced logits."""
FULL, SLIDING = "full_attention", "sliding_attention"
OWN_ATTENTION = "its attention does not go through transformers' attention interface"

_NEUTRAL = {"dropout", "position_ids", "use_cache", "output_attentions", "output_router_logits"}
_NEUTRAL |= {"output_hidden_states", "return_dict", "position_embeddings", "logits_to_keep", "layer_idx"}
"""Options of attention that change nothing here: there is no dropout in inference, and keys come rotated."""


@dataclass(frozen=True)
class Call:
    """A call of attention in a forward pass."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    soft_cap: float
    window: int
    sinks: bool


@dataclass(frozen=True, kw_only=True)
class TracedShape(ModelShape):
    """The shape of a model whose code is in transformers."""

    calls: tuple[Call, ...]
    body_inputs: dict[str, Any]
    """The arguments with which the language model calls its body. In place of tensors there are their names:
    "input_ids", "position_ids" and "attention_mask"."""
    config: Any = field(repr=False, compare=False)
    """The model's config, as the library has it."""
    architecture: type[Any] = field(repr=False, compare=False)
    body: str
    """The name of the body's module."""
    output: Any = field(repr=False, compare=False)
    """The class of the body's output."""
    kinds: tuple[tuple[RopeKind, int], ...]
    """The items of `rope_kinds`."""
    not_native: str = ""
    """The reason why our own code does not run the model; empty if our code was not tried."""

    @property
    def rope_kinds(self) -> Mapping[RopeKind, int]:
        return dict(self.kinds)


@dataclass(frozen=True)
class Mask:
    """A stand-in for the mask of some layers. window: the size of a causal mask's window, 0 if it has no
    window; None for a mask of any other kind."""

    window: int | None


def shape_of_folder(folder: Path, rope_scaling: Mapping[str, Any] | None = None) -> TracedShape:
    """The shape of the checkpoint in `folder`, read without weights. `rope_scaling` replaces the config's.

    Raises `UnsupportedField`, with the architecture's name, for a model that the pages cannot hold.
    """
    return _shape_of_folder(folder, json.dumps(rope_scaling))


@functools.lru_cache(maxsize=4)
def _shape_of_folder(folder: Path, rope_scaling: str) -> TracedShape:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # an unknown model_type, or fields that the library's classes refuse
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedField(
            f"transformers does not know this model either: {reason}",
            field="model",
            remedy="docs/models.md lists the models that run. A newer transformers may know more.",
        ) from None
    generation = folder / "generation_config.json"
    eos = None
    if generation.is_file():
        from transformers import GenerationConfig

        eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    return shape_of(config, eos=eos, rope_scaling=json.loads(rope_scaling))


def shape_of(config: Any, *, eos: Any = None, rope_scaling: Mapping[str, Any] | None = None) -> TracedShape:
    """The traced shape of a config of the library. `eos`: end tokens that replace the config's."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    architecture = _architecture(config)
    _check_config(config, text, architecture)
    if rope_scaling is not None:
        _extend(text, rope_scaling, architecture)
    ropes = _ropes(text)
    kinds = {rope["rope_type"]: _original(rope, text) for rope in ropes}
    for rope in ropes:
        if rope["rope_type"] == "dynamic":  # equal up to the original context, which is the engine's
            rope["rope_type"] = "default"
    calls, body = _traced(config, architecture)
    if not calls:
        raise _refused(architecture, OWN_ATTENTION)
    # Moshi's mask has no window. Its window is implemented by the library's cache, which drops older tokens.
    if any(DynamicCache(config=text).is_sliding) and not any(call.window for call in calls):
        raise _refused(architecture, "its cache has a sliding window and its mask has none")
    caps = {call.soft_cap for call in calls}
    if len(caps) > 1:
        raise _refused(architecture, f"its layers have different soft caps: {sorted(caps)}")
    heads, kv_heads, head_dim = _page_sizes(calls)
    length = getattr(text, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise _refused(architecture, "its config gives no max_position_embeddings")
    end = config.eos_token_id if getattr(config, "eos_token_id", None) is not None else text.eos_token_id
    begin = config.bos_token_id if getattr(config, "bos_token_id", None) is not None else text.bos_token_id
    return TracedShape(
        family=config.model_type,
        vocab_size=body.vocab_size,
        num_layers=len(calls),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=length,
        windows=tuple(call.window for call in calls),
        sinks=tuple(call.sinks for call in calls),
        attention_scale=calls[0].scale,
        attention_soft_cap=calls[0].soft_cap,
        eos_token_ids=token_ids(end if eos is None else eos),
        bos_token_id=begin,
        calls=calls,
        body_inputs=body.inputs,
        kinds=tuple(kinds.items()),
        config=config,
        architecture=architecture,
        body=body.name,
        output=body.output,
    )


def _page_sizes(calls: Iterable[Call]) -> tuple[int, int, int]:
    """Heads, KV heads and head size that the calls of all layers fit.

    Where layers differ, narrower heads are padded with zeros, and KV heads are repeated or padded: 4 heads on
    2 KV heads beside 4 on 4 become 4 on 4.
    """
    group = math.gcd(*(call.heads // call.kv_heads for call in calls))
    heads = max(call.heads for call in calls)
    widest = max(max(call.key_dim, call.value_dim) for call in calls)
    kv_heads = -(-heads // group)
    return kv_heads * group, kv_heads, widest + widest % 2


def _architecture(config: Any) -> type[Any]:
    try:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise UnsupportedField(
            f"transformers has no causal language model for {config.model_type!r}.",
            field="model",
            remedy="docs/models.md lists the models that run.",
        ) from None
    architecture: type[Any] = found[0] if isinstance(found, tuple) else found
    return architecture


def _check_config(config: Any, text: Any, architecture: type[Any]) -> None:
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        raise _refused(architecture, "it is an encoder-decoder: its decoder also attends to an encoder")
    if getattr(config, "quantization_config", None):
        kind = dict(config.quantization_config).get("quant_method", "unknown")
        raise _refused(
            architecture, f"its weights are quantised ({kind}), which only our own families read", "model"
        )
    kinds = {FULL, SLIDING}
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in kinds:
            raise _refused(architecture, f"it has layers of the type {kind!r}")


def _ropes(text: Any) -> list[dict[str, Any]]:
    """The rotary embeddings of the config; layers of different types may have different ones."""
    found = getattr(text, "rope_parameters", None) or {}
    return [rope for rope in (found, *found.values()) if isinstance(rope, dict) and "rope_type" in rope]


def _original(rope: Mapping[str, Any], text: Any) -> int:
    own: int = getattr(text, "max_position_embeddings", 0)
    return own if rope["rope_type"] == "dynamic" else rope.get("original_max_position_embeddings") or own


def _extend(text: Any, rope_scaling: Mapping[str, Any], architecture: type[Any]) -> None:
    before = getattr(text, "rope_parameters", None) or {}
    if "rope_type" not in before and "full_attention" not in before:
        raise _refused(
            architecture, "it has no rotary embedding that rope_scaling could extend", "rope_scaling"
        )
    changed = with_rope_scaling({**text.to_dict(), "rope_parameters": before}, rope_scaling)
    found = changed["rope_parameters"].get("full_attention") or changed["rope_parameters"]
    found["rope_type"] = rope_from_hf(changed, found, partial=True).kind
    text.rope_parameters = changed["rope_parameters"]
    text.max_position_embeddings = changed["max_position_embeddings"]
    if hasattr(text, "original_max_position_embeddings"):  # Phi-3's, which comes first there
        text.original_max_position_embeddings = found["original_max_position_embeddings"]


@dataclass(frozen=True)
class _Body:
    """The module below the head, the arguments that it is called with, and the class of its output."""

    name: str
    inputs: dict[str, Any]
    output: Any
    vocab_size: int


def _traced(config: Any, architecture: type[Any]) -> tuple[tuple[Call, ...], _Body]:
    recorder = _Recorder(architecture)
    try:
        with torch.device("meta"), torch.no_grad():
            # Experts are one batched product: the default would read the tokens of each expert on the host.
            options = implementations(architecture, "batched_mm")
            model = architecture._from_config(copy.deepcopy(config), **options).eval()
            ids = torch.zeros(1, TOKENS, dtype=torch.int64)
            tensors = {
                "input_ids": ids,
                "position_ids": torch.zeros_like(ids),
                "attention_mask": torch.ones_like(ids, dtype=torch.bool),
            }
            body = _body_of(model, architecture, tensors, recorder)
    except RamifyError:
        raise
    except Exception as error:
        raise _refused(architecture, _cause(error, architecture)) from error
    return tuple(recorder.calls), body


def implementations(architecture: type[Any], experts: str) -> dict[str, str]:
    """Options for the library's constructors: our attention, and `experts`, the way to multiply experts."""
    found = {"attn_implementation": NAME}
    return (
        found | {"experts_implementation": experts}
        if architecture._can_set_experts_implementation()
        else found
    )


def _body_of(model: Any, architecture: type[Any], tensors: dict[str, Tensor], recorder: _Recorder) -> _Body:
    """Run body and head under the recorder. `_Body.inputs` has the names of `tensors` in place of tensors."""
    base = model.base_model
    if base is model:
        raise _refused(architecture, "its code does not separate the body from the head")
    # OPT's language model calls the decoder inside its base model, not the base model itself.
    paths = {module: name for name, module in model.named_modules() if module in (base, *base.children())}
    begun: list[tuple[nn.Module, dict[str, Any]]] = []
    outputs: dict[nn.Module, Any] = {}

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        named = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        begun.append((module, named | named.pop("kwargs", {})))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        outputs[module] = output

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in paths]
    hooks += [module.register_forward_hook(after) for module in paths]
    with calling(recorder), _Watch(architecture, tensors["position_ids"]) as watch:
        model(**tensors, use_cache=False)
    for hook in hooks:
        hook.remove()
    body, given = begun[0]
    output = outputs[body]
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None or hidden.shape[:2] != (1, TOKENS):
        raise _refused(architecture, "its body returns no hidden state of each token")
    if not watch.positions_used:
        raise _refused(architecture, "it takes no position_ids: places in the batch are its positions")
    names = {id(tensor): name for name, tensor in tensors.items()}
    for key, value in given.items():
        if isinstance(value, Tensor) and id(value) not in names:
            raise _refused(architecture, f"its body takes {key}, which is made of the whole batch")
    inputs = {key: names.get(id(value), value) for key, value in given.items()}
    logits = Head(model, paths[body], type(output))(hidden[0, :ROWS])
    return _Body(paths[body], inputs, type(output), logits.shape[-1])


class Head:
    """Logits by the language model's own code, multipliers and caps included: its body is replaced by a
    module that returns given hidden states."""

    def __init__(self, model: Any, body: str, output: Any) -> None:
        self._model = model
        self._given = _Given(output)
        model.set_submodule(body, self._given)

    def __call__(self, hidden: Tensor) -> Tensor:
        """(R, hidden) → (R, vocab)."""
        self._given.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._model(input_ids=ids, position_ids=ids, use_cache=False).logits[0]
        self._given.hidden = None
        return logits


class _Given(nn.Module):
    def __init__(self, output: type[Any]) -> None:
        super().__init__()
        self._output = output
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._output(last_hidden_state=self.hidden)


class _Recorder:
    """Records attention calls, and refuses attention that our kernels cannot compute."""

    def __init__(self, architecture: type[Any]) -> None:
        self.calls: list[Call] = []
        self._architecture = architecture

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, options: Any
    ) -> Tensor:
        window, options = self._window(module, mask, options)
        cap = options.pop("softcap", None) or 0.0
        sinks = options.pop("s_aux", None)
        given = {name for name, value in options.items() if value is not None and name not in _NEUTRAL}
        if sinks is not None and sinks.shape != q.shape[1:2]:
            raise self._refused(f"its attention sinks are {tuple(sinks.shape)}, and not one a head")
        if given:
            raise self._refused(f"its attention takes {sorted(given)[0]}")
        if k.shape[2] != TOKENS or v.shape[2] != TOKENS or q.shape[2] != TOKENS:
            raise self._refused("its attention has another number of keys than of tokens")
        if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1] or q.shape[3] != k.shape[3]:
            raise self._refused(f"its heads do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}")
        scale = q.shape[3] ** -0.5 if scale is None else float(scale)
        sizes = q.shape[1], k.shape[1], k.shape[3], v.shape[3]
        self.calls.append(Call(*sizes, scale, float(cap), window, sinks is not None))
        return q.new_empty(1, TOKENS, q.shape[1], v.shape[3])

    def _window(self, module: nn.Module, mask: Any, options: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        options = dict(options)
        window, causal = options.pop("sliding_window", None), options.pop("is_causal", None)
        if causal is None:
            causal = getattr(module, "is_causal", True)
        if isinstance(mask, Mask):
            if mask.window is None:
                raise self._refused("its attention mask is neither causal nor a sliding window")
            return mask.window, options
        if mask is not None:
            raise self._refused("it adds to the attention mask")
        if not causal:
            raise self._refused("its attention is not causal")
        return window or 0, options

    def mask(self, visible: Callable[..., Any], window: int | None, plain: bool) -> Mask:
        return Mask(window or 0 if plain and _is_window(visible, window or 0) else None)

    def _refused(self, reason: str) -> UnsupportedField:
        return _refused(self._architecture, reason)


def _is_window(visible: Callable[..., Any], window: int) -> bool:
    """Whether `visible` is the causal mask with this window, tested around the window's borders."""
    size = window or 1000
    q = torch.tensor([size + 1, 2 * size + 1, 2 * size - 1, size, 5 * size], device="cpu")[:, None]
    k = q - torch.tensor([-size, -1, 0, 1, size - 1, size, size + 1], device="cpu")
    wanted = (k <= q) & ((k > q - window) | (window == 0))
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    found = visible(zero, zero, q, k)
    return found.device.type == "cpu" and bool(torch.equal(found.expand_as(wanted), wanted))


_JOINING = {"aten.convolution", "aten.cumsum", "aten.cumprod", "aten.roll", "aten.flip", "aten.unfold"}
_JOINING |= {"aten.constant_pad_nd", "aten.sort", "aten._softmax", "aten.mean", "aten.sum", "aten.logsumexp"}
_JOINING |= {"aten.topk", "aten.max", "aten.amax", "aten.cummax", "aten.select", "aten.slice"}
_PRODUCTS = {"aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"}


class _Watch(TorchDispatchMode):
    """Refuses operations along the token dimension."""

    def __init__(self, architecture: type[Any], positions: Tensor) -> None:
        super().__init__()
        self.positions_used = False
        self._architecture = architecture
        self._positions = positions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.positions_used |= any(arg is self._positions for arg in args)
        name = str(func).rsplit(".", 1)[0]
        if (name in _JOINING and _along_tokens(name, args, result)) or (
            name in _PRODUCTS and args[-1].shape[-2] == TOKENS
        ):
            raise _refused(self._architecture, f"it joins tokens outside of attention ({name})")
        return result


def _along_tokens(name: str, args: Any, result: Any) -> bool:
    """Whether an operation on a tensor of all tokens changes the token dimension or reduces over it."""
    tensor = args[0]
    if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point or TOKENS not in tensor.shape:
        return False
    places = [place for place, size in enumerate(tensor.shape) if size == TOKENS]
    if name in ("aten.convolution", "aten.roll", "aten.flip", "aten.unfold"):
        return True
    if name in ("aten.constant_pad_nd", "aten.slice"):
        return TOKENS not in result.shape
    dims = args[1] if len(args) > 1 else None
    dims = range(tensor.dim()) if dims is None or dims == [] else dims
    if name == "aten.topk":
        dims = args[2] if len(args) > 2 else -1
    dims = [dims] if isinstance(dims, int) else list(dims)
    return any(dim % tensor.dim() in places for dim in dims)


def _cause(error: Exception, architecture: type[Any]) -> str:
    """The error in the library's code, in one line."""
    names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if "create_recurrent_attention_mask" in names:
        return "it has recurrent layers"
    if not architecture._supports_attention_backend:
        return OWN_ATTENTION
    if "'Mask' object" in str(error):
        return "it computes an attention mask of its own"
    if "nonzero" in str(error) or "meta tensor" in str(error):
        return "its code reads values of the batch on the host"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"its code cannot be traced without weights ({type(error).__name__}: {reason[:160]})"


def _refused(architecture: type[Any], reason: str, field: str = "model") -> UnsupportedField:
    return UnsupportedField(
        f"{architecture.__name__} of transformers cannot run on KV pages: {reason}.",
        field=field,
        remedy="docs/models.md lists the models that run.",
    )


def missing_tensors(architecture: type[Any], loading: dict[str, Any]) -> InvalidRequest | None:
    """The error for a checkpoint that does not fit the model, from the library's report; None if it fits."""
    for what, names in (
        ("lacks", loading["missing_keys"]),
        ("has tensors that the model does not", loading["unexpected_keys"]),
        ("has tensors of other shapes", loading["mismatched_keys"]),
    ):
        if names:
            first = ", ".join(str(name) for name in sorted(map(str, names))[:3])
            more = ", …" * (len(names) > 3)
            return InvalidRequest(
                f"This checkpoint of {architecture.__name__} {what}: {first}{more}.", field="model"
            )
    return None
