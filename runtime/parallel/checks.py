"""Checks, before weights load, for models and options that several ranks cannot run."""

from __future__ import annotations

import math
from pathlib import Path

from ramify.errors import UnsupportedField
from ramify.runtime.config import EngineConfig
from ramify.runtime.model.quantization import GROUPS, resolve_quantization
from ramify.runtime.model.shape.config import ModelConfig, ModelShape, part_of

_OPTIONS = {
    "draft_model": "the draft model would need ranks of its own",
    "loras": "adapters are not divided among ranks",
    "cuda_graphs": "sums over the ranks are not captured",
}


def check_ranks(config: EngineConfig, shape: ModelShape, weights: Path) -> None:
    """Raise `UnsupportedField` if the ranks of `config` cannot run the model of `shape` in `weights`."""
    count = config.tensor_parallel
    if count == 1:
        return
    for name, reason in _OPTIONS.items():
        if getattr(config, name):
            raise UnsupportedField(
                f"{name} is set and tensor_parallel is {count}: {reason}.",
                field=name,
                remedy=f"Leave {name} out, or tensor_parallel.",
            )
    possible, model = possible_ranks(config, shape, weights), divisible(shape)
    if count not in possible:
        group = input_group(config, model, weights)
        groups = f" with quantised groups of {group} inputs" if group > 1 else ""
        names = " or ".join(map(str, possible))
        raise UnsupportedField(
            f"tensor_parallel is {count}, and this model has {shape.num_heads} query heads, "
            f"{shape.num_kv_heads} KV heads and an MLP of {model.intermediate_size}{groups}: these divide by "
            f"{names}.",
            field="tensor_parallel",
            remedy=f"Choose {names}." if len(possible) > 1 else "Leave it out.",
        )


def divisible(shape: ModelShape) -> ModelConfig:
    """Return `shape` if the layers of its family can be divided. Raises `UnsupportedField` if not."""
    reason = None
    if not isinstance(shape, ModelConfig):
        reason = "is computed by transformers' code, and a model of our own families is needed"
    elif shape.states is not None:
        reason = "has linear attention layers, which are not divided among ranks"
    elif shape.experts is not None:
        reason = "has experts, which are not divided among ranks"
    if reason is not None or not isinstance(shape, ModelConfig):
        raise UnsupportedField(
            f"tensor_parallel is set, and {shape.family} {reason}.",
            field="tensor_parallel",
            remedy="Leave it out.",
        )
    return shape


def possible_ranks(config: EngineConfig, shape: ModelShape, weights: Path) -> list[int]:
    """The numbers of ranks among which the model can be divided. Raises `UnsupportedField` as `divisible`
    does."""
    model = divisible(shape)
    return counts(model, input_group(config, model, weights))


def counts(shape: ModelConfig, group: int) -> list[int]:
    """The numbers of ranks among which a model can be divided if each `group` of inputs shares a scale."""
    divided = shape.num_heads, shape.num_kv_heads, shape.intermediate_size
    inputs = shape.num_heads * shape.head_dim, shape.intermediate_size

    def divides(count: int) -> bool:
        whole_groups = count == 1 or not any(size // count % group for size in inputs)
        return whole_groups and not any(size % count for size in divided)

    return [count for count in range(1, shape.num_kv_heads + 1) if divides(count)]


def input_group(config: EngineConfig, shape: ModelConfig, weights: Path) -> int:
    """The number of inputs that share a scale in the matrices divided by inputs; 1 if no such matrix is
    quantised.

    Single matrices of a checkpoint may be unquantised or have other groups. Loading refuses a matrix that
    cannot be divided.
    """
    quantization = resolve_quantization(
        config.quantization, weights, exact=config.dtype == "float32", quantised=shape.quantised
    )
    if quantization == "gguf":
        return _group_in_file(weights)
    if quantization == "checkpoint":
        found = shape.quantised
        assert found is not None
        layouts = [layout for _, layout in found.config_groups] or [found]
        sizes = [size for each in layouts for size in (*each.groups, *(width for _, width in each.blocks))]
        return math.lcm(*sizes) if sizes else 1
    return GROUPS.get(quantization, 1)


def part_for(shape: ModelShape, index: int, count: int) -> ModelShape:
    """The config of the part that rank `index` holds, for a model that passed `check_ranks`."""
    return shape if count == 1 else part_of(divisible(shape), index, count)


def _group_in_file(weights: Path) -> int:
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    from ramify.runtime.model.gguf.blocks import rows_of
    from ramify.runtime.model.gguf.header import read_header

    sizes = [1]
    tensors = read_header(weights).tensors
    for kind in {info.type for name, info in tensors.items() if "attn_output" in name or "ffn_down" in name}:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        rows = rows_of(np.zeros((1, 1, size), np.uint8), GGMLQuantizationType(kind), (1, block))
        if rows is not None:
            sizes.append(block // rows.factors.shape[1] if rows.factors is not None else 1)
    return math.lcm(*sizes)
