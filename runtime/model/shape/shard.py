"""Tensor parallelism: the part of each matrix that a rank holds.

Example: two ranks, 4 query heads, 2 KV heads.

    q_proj, k_proj, v_proj    by outputs   rank 0: heads 0 and 1, KV head 0   rank 1: heads 2 and 3, KV head 1
    o_proj                    by inputs    rank 0: the inputs of heads 0, 1   rank 1: those of heads 2, 3
    gate_proj, up_proj        by outputs   half of the rows each
    down_proj                 by inputs    the columns of those rows
    norms, embedding          whole on both; the head is on rank 0 alone

So a layer needs two sums over the ranks: of the products with o_proj, and of those with down_proj (arXiv
1909.08053).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ramify.errors import UnsupportedField
from ramify.kernels.weights.rows import Rows
from ramify.runtime.model.shape.config import ModelConfig, Shard

Entry = Tensor | Rows

_BY_INPUTS = ("o_proj", "down_proj")
_NAME = re.compile(r"model\.layers\.\d+\.\w+\.(\w+)\.(weight|bias)")


def parts_of_rank(
    entries: Iterable[tuple[str, Entry]], config: ModelConfig, *, keep: bool
) -> Iterator[tuple[str, Entry]]:
    """One rank's part of a checkpoint's tensors, with their Hugging Face names. `config` is the rank's.

    keep : whether the model keeps quantised rows; if not, rows divided by inputs are dequantised

    Raises `UnsupportedField` for a matrix that cannot be divided.
    """
    shard = config.shard
    for name, entry in entries:
        if name == "lm_head.weight" and shard.index > 0:
            continue
        found = _NAME.fullmatch(name)
        if found is None:
            yield name, entry
        elif found[1] in _BY_INPUTS:
            yield name, _by_inputs(name, entry, shard, keep=keep)
        else:
            sizes = _divided_rows(found[1], config)
            over_heads = found[1] not in ("q_norm", "k_norm") or len(entry) != config.head_dim
            yield name, _rows(entry, sizes, shard) if sizes and over_heads else entry


def _divided_rows(module: str, config: ModelConfig) -> tuple[int, ...]:
    """The rank's number of rows of each matrix stacked in `module`; empty if rows of `module` are not
    divided."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    by_module: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("q_proj", "q_norm"), (queries,)),
        **dict.fromkeys(("k_proj", "v_proj", "k_norm"), (keys,)),
        **dict.fromkeys(("gate_proj", "up_proj"), (inner,)),
        "qkv_proj": (queries, keys, keys),
        "gate_up_proj": (inner, inner),
    }
    return by_module.get(module, ())


def _rows(entry: Entry, sizes: tuple[int, ...], shard: Shard) -> Entry:
    """The rank's rows of each stacked matrix. `sizes`: the rank's number of rows of each. An `entry` with
    another number of rows than the config's is returned whole; filling the model refuses it."""
    if len(entry) != shard.count * sum(sizes):
        return entry
    chosen, start = [], 0
    for size in sizes:
        chosen.append(torch.arange(start + shard.index * size, start + (shard.index + 1) * size))
        start += shard.count * size
    index = torch.cat(chosen)
    return entry.index_select(index) if isinstance(entry, Rows) else entry[index]


def _by_inputs(name: str, entry: Entry, shard: Shard, *, keep: bool) -> Entry:
    """The rank's columns of a matrix. A bias goes whole to the first rank; the others get zeros."""
    if isinstance(entry, Tensor) and entry.dim() == 1:
        return entry if shard.index == 0 else torch.zeros_like(entry)
    if isinstance(entry, Rows) and not keep:
        entry = entry.values()
    inputs = (entry.numbers if isinstance(entry, Rows) else entry).shape[1]
    if inputs % shard.count:
        return entry  # of another size than the config says: refused when it is filled
    size = inputs // shard.count
    part = slice(shard.index * size, (shard.index + 1) * size)
    if isinstance(entry, Tensor):
        return entry[:, part]
    entry = entry.decoded()
    numbers = entry.numbers[:, part].contiguous()
    if entry.factors is None:
        return dataclasses.replace(entry, numbers=numbers)
    if entry.order is not None:
        raise _indivisible(name, "its groups of inputs do not lie side by side (desc_act)")
    if entry.factors.shape[1] == 1:
        return dataclasses.replace(entry, numbers=numbers, group=0)
    if size % entry.group:
        raise _indivisible(name, f"{size} of its {inputs} inputs are not whole groups of {entry.group}")
    groups = slice(part.start // entry.group, part.stop // entry.group)

    def of_groups(scales: Tensor | None) -> Tensor | None:
        return None if scales is None else scales[:, groups].contiguous()

    return dataclasses.replace(
        entry, numbers=numbers, factors=of_groups(entry.factors), offsets=of_groups(entry.offsets)
    )


def _indivisible(name: str, reason: str) -> UnsupportedField:
    return UnsupportedField(
        f"{name} cannot be divided among the ranks: {reason}.",
        field="tensor_parallel",
        remedy="Choose another tensor_parallel, or quantization='none', which dequantises the weights.",
    )
