"""Reads LoRA adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors.

Fields and their meaning: PEFT's `LoraConfig`. A field that would change the adapter and is not supported is
refused by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ramify.errors import InvalidRequest, UnsupportedField

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OF_TRAINING = {"lora_dropout", "task_type", "revision", "inference_mode"}
_OF_TRAINING |= {"auto_mapping", "peft_version", "megatron_core", "megatron_config", "qalora_group_size"}
_OF_TRAINING |= {"eva_config", "lora_ga_config", "runtime_config", "ensure_weight_tying", "loftq_config"}
"""Fields that do not change what a saved adapter computes."""
_Names = str | list[str] | None
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Rank = Annotated[int, msgspec.Meta(gt=0)]


class LoraConfig(msgspec.Struct):
    """The supported fields of `adapter_config.json`. PEFT writes null for a field without a value."""

    r: _Rank
    lora_alpha: _Positive = 8
    use_rslora: bool | None = None
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, _Positive] | None = None
    target_modules: _Names = None
    exclude_modules: _Names = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: _Names = None
    base_model_name_or_path: str | None = None

    def targets(self, module: str) -> bool | None:
        """Whether the adapter changes `module`, as PEFT's `check_target_module_exists` says; None if it
        changes all linear modules."""
        targets, layers = self.target_modules, self.layers_to_transform
        if self.exclude_modules and _named(self.exclude_modules, module):
            return False
        if targets is None or targets == "all-linear":
            return None
        if not _named(targets, module):
            return False
        if isinstance(targets, str) or module in targets or layers is None or layers == []:
            return True
        patterns = self.layers_pattern or [r"[^.]*"]
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            match = re.match(_LAYER.format(pattern), module)
            if match is not None:
                return int(match[match.re.groups]) in ([layers] if isinstance(layers, int) else layers)
        return False


_REASONS = {
    "use_dora": "DoRA scales whole weight matrices",
    "modules_to_save": "an adapter with whole modules of its own is another model",
    "trainable_token_indices": "an adapter with embeddings of its own is another model",
    "target_parameters": "adapters of parameters, such as experts, are not supported",
    "fan_in_fan_out": "no model here stores transposed weights",
}
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model's weights unchanged."""


@dataclasses.dataclass(frozen=True)
class Delta:
    """scale · B A, added to the weight of one projection. a: (rank, inputs), b: (outputs, rank)."""

    a: Tensor
    b: Tensor
    scale: float


@dataclasses.dataclass(frozen=True)
class PeftAdapter:
    """An adapter on disk.

    revision : a digest of the two files
    deltas : module's name in the base model's checkpoint → its delta
    """

    revision: str
    deltas: Mapping[str, Delta]
    config: LoraConfig


def read_adapter(folder: Path) -> PeftAdapter:
    """The adapter in `folder`.

    Raises `InvalidRequest` if the folder is no valid adapter, and `UnsupportedField` if the adapter has an
    unsupported feature.
    """
    digest = hashlib.sha256()
    files = {}
    for name in (CONFIG, WEIGHTS):
        try:
            files[name] = (folder / name).read_bytes()
        except OSError as error:
            raise _bad(
                folder,
                f"{name} cannot be read ({error.strerror})",
                remedy=f"A LoRA adapter is a local folder with {CONFIG} and {WEIGHTS}, as PEFT saves it.",
            ) from None
        digest.update(hashlib.sha256(files[name]).digest())
    try:
        fields = msgspec.json.decode(files[CONFIG], type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad(folder, f"{CONFIG} is no JSON object: {error}") from None
    config = _checked(folder, fields)
    try:
        tensors = load(files[WEIGHTS])
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise _bad(folder, f"{WEIGHTS} is not a readable safetensors file: {error}") from None
    return PeftAdapter(digest.hexdigest()[:16], _deltas(folder, config, tensors), config)


def _checked(folder: Path, fields: Mapping[str, Any]) -> LoraConfig:
    kind, bias = fields.get("peft_type", "LORA"), fields.get("bias", "none")
    if kind != "LORA":
        raise _refused(folder, f"peft_type is {kind!r}, and only 'LORA' is supported")
    if bias != "none":
        raise _refused(folder, f"bias is {bias!r}, and adapters change no bias here")
    start = fields.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise _refused(
            folder,
            f"init_lora_weights is {start!r}, which changes the base model's weights",
            remedy="Save it with PEFT's path_initial_model_for_weight_conversion.",
        )
    known = {"peft_type", "bias", "init_lora_weights", *LoraConfig.__struct_fields__, *_OF_TRAINING}
    for name, value in fields.items():
        if value and name not in known:
            reason = _REASONS.get(name, "it is not supported")
            raise _refused(
                folder, f"{name} is set: {reason}", remedy="Merge the adapter into the checkpoint."
            )
    try:
        config = msgspec.convert(fields, LoraConfig)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        raise _bad(folder, f"{place.rstrip('`') or CONFIG}: {problem}") from None
    for name, form in _PATTERNS.items():
        given = getattr(config, name) or ()
        for pattern in [given] if isinstance(given, str) else given if form is not _WHOLE else ():
            try:
                re.compile(form.format(pattern))
            except re.error as error:
                raise _bad(folder, f"{name}: {pattern!r} is no regular expression: {error}") from None
    return config


_WHOLE, _MODULE, _LAYER = "{}", r"(.*\.)?({})$", r".*\.{}\.(\d+)\."
_PATTERNS = {"target_modules": _WHOLE, "exclude_modules": _WHOLE, "rank_pattern": _MODULE}
_PATTERNS |= {"alpha_pattern": _MODULE, "layers_pattern": _LAYER}
"""The regular expression that PEFT makes of a field's pattern. Lists of modules are no patterns."""


_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")


def _deltas(folder: Path, config: LoraConfig, tensors: Mapping[str, Tensor]) -> dict[str, Delta]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise _refused(folder, f"it has the tensor {name}, which is no matrix of a LoRA of a projection")
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise _bad(folder, f"{name} is {tuple(tensor.shape)} {tensor.dtype}; a matrix is needed")
        found.setdefault(match[1], {})[match[2]] = tensor
    if not found:
        raise _bad(folder, f"{WEIGHTS} has no tensors")
    deltas = {}
    for module, pair in found.items():
        if len(pair) != 2:
            raise _bad(folder, f"{module} has only one of lora_A and lora_B")
        rank = _pattern(config.rank_pattern, module, config.r)
        alpha = _pattern(config.alpha_pattern, module, config.lora_alpha)
        a, b = pair["A"], pair["B"]
        if len(a) != rank or b.shape[1] != rank:
            ranks = f"{len(a)} and {b.shape[1]}"
            raise _bad(folder, f"the matrices of {module} have ranks {ranks}, and its config says {rank}")
        root = math.sqrt(rank) if config.use_rslora else rank
        deltas[module] = Delta(a, b, alpha / root)
    return deltas


def _pattern(patterns: Any, module: str, default: Any) -> Any:
    """The value of the first pattern that matches `module` (PEFT's `get_pattern_key`), else `default`."""
    for pattern, value in (patterns or {}).items():
        if re.match(_MODULE.format(pattern), module):
            return value
    return default


def _named(names: Any, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _bad(folder: Path, reason: str, remedy: str | None = None) -> InvalidRequest:
    return InvalidRequest(f"The adapter {folder} cannot be loaded: {reason}.", field="path", remedy=remedy)


def _refused(folder: Path, reason: str, remedy: str | None = None) -> UnsupportedField:
    return UnsupportedField(f"The adapter {folder} is not supported: {reason}.", field="path", remedy=remedy)
