"""`quantization_config` of a `config.json`: the fields that are read, and the values that are refused.
Imports no torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ramify.errors import InvalidRequest, UnsupportedField

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Quantised:
    """The quantisation of a checkpoint's matrices. Whether a matrix is quantised is read from its tensors: a
    quantised matrix has the tensors of its scheme, an unquantised matrix has only `weight`."""

    method: str
    """`quant_method`: compressed-tensors, awq, gptq, fp8 or mxfp4."""
    groups: tuple[int, ...] = ()
    """Inputs of a group, for each scheme that has groups."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Outputs and inputs of a block, for each scheme that has blocks."""
    float8_activations: bool = False
    """Whether the checkpoint wants activations rounded to float8, with static or dynamic scales, before
    products with float8 weights."""
    zero_shift: int = 0
    """Number to add to the stored zero points of gptq: 1 in the first version of the format."""
    config_groups: tuple[tuple[tuple[str, ...], Quantised], ...] = ()
    """(targets, quantisation) for each of compressed-tensors' `config_groups`, if not all are alike. A target
    is the name of a module, `re:` with a pattern that matches from the start of a name, or a class: "Linear"
    for all matrices."""

    @property
    def any_float8_activations(self) -> bool:
        """Whether the activations of any matrix are to be rounded to float8."""
        layouts = [layout for _, layout in self.config_groups] or [self]
        return any(layout.float8_activations for layout in layouts)

    def for_matrix(self, name: str) -> Quantised:
        """The quantisation of the matrix `name`, given without `.weight`. A target that equals `name` has
        precedence over patterns, and patterns over classes.

        Raises `InvalidRequest` unless the matching targets belong to exactly one layout.
        """
        if not self.config_groups:
            return self

        def layouts(matches: Callable[[str], object]) -> set[Quantised]:
            return {layout for targets, layout in self.config_groups if any(map(matches, targets))}

        found = layouts(lambda target: target == name)
        found = found or layouts(lambda target: target[:3] == "re:" and re.match(target[3:], name))
        found = found or layouts(lambda target: target == "Linear")
        if len(found) != 1:
            raise InvalidRequest(
                f"The targets of {len(found)} layouts of quantization_config.config_groups match {name}; one "
                "is needed.",
                field="model",
            )
        return found.pop()


def quantised_of(config: Fields) -> Quantised | None:
    """The quantisation that a `config.json` describes in `quantization_config`, or in its older name
    `compression_config`; None if it has neither.

    Raises `UnsupportedField`, with the name of the field, for a value that is not implemented.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise _refused("", found, "an object")
    method = found.get("quant_method")
    reader = _READERS.get(str(method))
    if reader is None:
        raise _refused("quant_method", method, f"one of {', '.join(_READERS)}")
    return reader(found)


def _refused(name: str, value: object, wanted: str) -> UnsupportedField:
    field = f"quantization_config.{name}".rstrip(".")
    return UnsupportedField(
        f"This checkpoint is quantised with {field} = {value!r}, which is not implemented.",
        field=field,
        remedy=f"Choose a checkpoint whose {field} is {wanted}.",
    )


def _object(name: str, value: object) -> Fields:
    if value is not None and not isinstance(value, Mapping):
        raise _refused(name, value, "an object")
    return value or {}


def _check(fields: Fields, prefix: str = "", **allowed: tuple[Any, ...]) -> None:
    """Raise for the first field with a value not in its `allowed` values. None allows an absent field."""
    for name, values in allowed.items():
        if fields.get(name) not in values:
            wanted = " or ".join("absent" if value is None else repr(value) for value in values)
            raise _refused(prefix + name, fields.get(name), wanted)


def _awq(fields: Fields) -> Quantised:
    bits = fields.get("bits", fields.get("w_bit"))
    group = fields.get("group_size", fields.get("q_group_size", 128))
    _check({"bits": bits}, bits=(4,))
    _check(fields, version=(None, "gemm", "GEMM"), zero_point=(None, True))
    return Quantised("awq", groups=_groups(group))


def _gptq(fields: Fields) -> Quantised:
    _check(fields, bits=(4, 8), is_marlin_format=(None, False), checkpoint_format=(None, "gptq", "gptq_v2"))
    for name, changes in _object("dynamic", fields.get("dynamic")).items():
        # A module whose name begins with "-:" is not quantised; others have bits and groups of their own.
        if not name.startswith("-:"):
            raise _refused("dynamic", {name: changes}, "about excluded modules only")
    shift = 0 if fields.get("checkpoint_format") == "gptq_v2" else 1
    return Quantised("gptq", groups=_groups(fields.get("group_size", 128)), zero_shift=shift)


def _fp8(fields: Fields) -> Quantised:
    _check(fields, fmt=(None, "e4m3"), activation_scheme=(None, "dynamic", "static"))
    block = fields.get("weight_block_size")
    return Quantised("fp8", blocks=_blocks("weight_block_size", block), float8_activations=True)


def _mxfp4(fields: Fields) -> Quantised:
    return Quantised("mxfp4", groups=(32,))


_FORMATS = (
    None,
    "float-quantized",
    "int-quantized",
    "pack-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)


def _compressed(fields: Fields) -> Quantised:
    _check(fields, format=_FORMATS, kv_cache_scheme=(None,), quantization_status=(None, "compressed"))
    sparsity = _object("sparsity_config", fields.get("sparsity_config"))
    _check(sparsity, "sparsity_config.", format=(None, "dense"))
    if fields.get("transform_config"):
        raise _refused("transform_config", fields["transform_config"], "absent")
    found = []
    for name, entry in _object("config_groups", fields.get("config_groups")).items():
        prefix = f"config_groups.{name}."
        group = _object(prefix[:-1], entry)
        _check(group, prefix, format=_FORMATS, output_activations=(None,))
        targets = group.get("targets", ["Linear"])
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise _refused(f"{prefix}targets", targets, "a list of names")
        for target in targets:
            if target.startswith("re:"):
                _check_pattern(f"{prefix}targets", target[3:])
        weights = _object(f"{prefix}weights", group.get("weights"))
        if not weights:
            continue
        prefix += "weights."
        is_float = weights.get("type") == "float"
        _check(weights, prefix, type=(None, "int", "float"), dynamic=(None, False))
        _check(weights, prefix, num_bits=(8,) if is_float else (4, 8))
        _check(weights, prefix, strategy=(None, "tensor", "channel", "group", "block"))
        groups = _groups(weights.get("group_size"))
        blocks = _blocks(f"{prefix}block_structure", weights.get("block_structure"))
        given = _object(f"config_groups.{name}.input_activations", group.get("input_activations"))
        rounded = is_float and given.get("type") == "float" and given.get("num_bits") == 8
        found.append((tuple(targets), Quantised("compressed-tensors", groups, blocks, rounded)))
    layouts = [layout for _, layout in found] or [Quantised("compressed-tensors")]
    alike = len(set(layouts)) == 1
    return layouts[0] if alike else dataclasses.replace(layouts[0], config_groups=tuple(found))


def _check_pattern(name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise _refused(name, pattern, "a regular expression") from error


def _groups(size: object) -> tuple[int, ...]:
    """The group size, in a tuple; empty if the inputs are not in groups."""
    if size is None or size == -1:
        return ()
    if not isinstance(size, int) or size < 16 or size % 16:
        raise _refused("group_size", size, "a multiple of 16, or -1")
    return (size,)


def _blocks(name: str, block: object) -> tuple[tuple[int, int], ...]:
    if block is None:
        return ()
    if isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) for size in block):
        outputs, inputs = block
        if outputs > 0 and inputs > 0 and inputs % 16 == 0:
            return ((outputs, inputs),)
    raise _refused(name, block, "[outputs, inputs], the latter a multiple of 16")


_READERS: dict[str, Callable[[Fields], Quantised]] = {
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
