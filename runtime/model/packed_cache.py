"""Packed models on disk: laid out once, then mapped into memory at every start."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ramify import cache
from ramify.kernels.packed import LAYOUT_VERSION, PackedWeight
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.layers import Linear

log = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes: a cache line, so that no vector of weights spans two."""
CACHED_FROM = 1 << 25
"""Bytes of files: less is packed within a tenth of a second, and is often some test's."""

_FIELDS = ("panels", "scales", "bias")


def load_packed(
    weights: list[Path], variant: str, empty: Callable[[], Model], full: Callable[[], Model]
) -> Model:
    """The model of the files `weights`, packed as `variant` says, from the cache where it is there.

    `empty` makes the model without values; `full` reads and packs it. Small
    files, and all where the cache cannot be written, are read and packed anew.
    """
    if sum(path.stat().st_size for path in weights) < CACHED_FROM:
        return full()
    entry = cache.entry_of(
        weights, "packed", f"{weights[0].resolve().stem}-{variant}", LAYOUT_VERSION, torch.__version__
    )
    built: list[Model] = []

    def build(folder: Path) -> None:
        built.append(full())
        _write(built[0], folder)

    try:
        cache.ensure(entry, build)
    except (OSError, cache.NotWritable) as error:
        log.warning("The packed model cannot be cached, so every start packs it again: %s", error)
        return built[0] if built else full()
    built.clear()
    cache.remove_outdated(entry)
    model = empty()
    _read(model, entry)
    return model


def _parts(model: Model) -> Iterator[tuple[str, list[PackedWeight], Callable[[list[PackedWeight]], None]]]:
    """Every matrix that may be packed: its name, what it is packed as, and how to set that."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield name, module.packed, module.use_packed
    head = [] if model.packed_head is None else [model.packed_head]
    yield "head", head, lambda packed: model.use_packed_head(packed[0])


def _write(model: Model, folder: Path) -> None:
    index: dict[str, Any] = {"plain": {}, "packed": {}}
    with (folder / "weights").open("wb") as file:

        def put(tensor: Tensor) -> dict[str, Any]:
            file.write(bytes(-file.tell() % ALIGNMENT))
            place = {"at": file.tell(), "shape": list(tensor.shape), "dtype": str(tensor.dtype)[6:]}
            if tensor.numel():
                file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
            return place

        def fields(weight: PackedWeight) -> dict[str, Any]:
            entries = ((field.name, getattr(weight, field.name)) for field in dataclasses.fields(weight))
            return {key: put(value) if isinstance(value, Tensor) else value for key, value in entries}

        for name, packed, _ in _parts(model):
            if packed:
                index["packed"][name] = [fields(weight) for weight in packed]
        for name, parameter in model.named_parameters():
            if parameter.numel():
                index["plain"][name] = put(parameter)
    (folder / "index.json").write_text(json.dumps(index))


def _read(model: Model, folder: Path) -> None:
    path = folder / "weights"
    index = json.loads((folder / "index.json").read_text())
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def get(place: dict[str, Any]) -> Tensor:
        dtype, shape = getattr(torch, place["dtype"]), place["shape"]
        count = int(torch.Size(shape).numel())
        if not count:
            return torch.empty(shape, dtype=dtype)
        return data[place["at"] : place["at"] + count * dtype.itemsize].view(dtype).view(shape)

    setters = {name: use for name, _, use in _parts(model)}
    for name, packed in index["packed"].items():
        weights = []
        for fields in packed:
            tensors: dict[str, Any] = {field: get(fields[field]) for field in _FIELDS}
            weights.append(PackedWeight(**{**fields, **tensors}))
        setters[name](weights)
    for name, place in index["plain"].items():
        owner, _, attribute = name.rpartition(".")
        parameter = nn.Parameter(get(place), requires_grad=False)
        setattr(model.get_submodule(owner), attribute, parameter)
        if name == "embedding" and model.config.tie_embeddings:
            model.head = parameter
