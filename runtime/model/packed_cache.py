"""Packed models on disk: laid out once, then mapped into memory at every start.

`torch.save` aligns tensors to 64 bytes, a cache line, as the kernels' vector loads need. The archives have no
checksums, so `torch.load` can read them and `unzip` cannot.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ramify import cache
from ramify.kernels.weights.packed import LAYOUT_VERSION, PackedWeight
from ramify.kernels.weights.routing import ClampedGate
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.experts import MixtureOfExperts
from ramify.runtime.model.layers import Linear
from ramify.runtime.model.shape.config import ModelConfig

log = logging.getLogger(__name__)

CACHED_FROM = 1 << 25
"""Bytes of weight files from which on a model is cached. Smaller models are packed within 0.1 s."""
_FILE = "packed.pt"


def load_packed(
    weights: list[Path],
    variant: str,
    config: ModelConfig,
    empty: Callable[[], Model],
    full: Callable[[], Model],
    *,
    most: int,
) -> Model:
    """The model of the files `weights` with the layout `variant`, from the cache if it has an entry for this
    model.

    An entry belongs to one `config`, since the order of rows depends on the config. `empty` makes the model
    without values; `full` reads and packs the model. All entries together take at most `most` bytes: the
    least recently used are removed. Not cached are models of small files and models larger than `most`. If
    the cache cannot be written, it is not used.
    """
    if most == 0 or sum(path.stat().st_size for path in weights) < CACHED_FROM:
        return full()
    name = f"{weights[0].resolve().stem}-{variant}"
    whole = dataclasses.replace(config, context_length=0)  # it can be chosen, and orders nothing
    entry = cache.entry_of(weights, "packed", name, LAYOUT_VERSION, torch.__version__, _FILE, repr(whole))
    built: list[Model] = []

    def build(folder: Path) -> None:
        built.append(full())
        size = bytes_of(built[0])
        if size > most:
            raise cache.NotWritable(
                f"it takes {size / 2**30:.1f} GiB, and packed_cache_gb is {most / 2**30:.1f}"
            )
        cache.remove_outdated(entry)
        cache.bound("packed", most - size, using=entry)
        _write(built[0], folder / _FILE)

    def mapped(folder: Path) -> Model:
        built.clear()
        model = empty()
        _read(model, folder / _FILE)
        return model

    try:
        model = cache.opened(entry, build, mapped)
    except (OSError, cache.NotWritable) as error:
        log.warning("The packed model cannot be cached, so every start packs it again: %s", error)
        return built[0] if built else full()
    cache.bound("packed", most, using=entry)
    return model


def _parts(model: Model) -> Iterator[tuple[str, list[PackedWeight], Callable[[list[PackedWeight]], None]]]:
    """(name, packed weights, setter) of every matrix that may be packed."""
    for name, module in model.named_modules():
        if isinstance(module, Linear | MixtureOfExperts):
            yield name, module.packed, module.use_packed


def _write(model: Model, path: Path) -> None:
    packed = {name: [_fields(weight) for weight in weights] for name, weights, _ in _parts(model) if weights}
    plain = {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.numel()}
    # Checksums take as long as all else (0.2 s of 0.4 for 700 MB), and a mapped file is read without them.
    checked = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"packed": packed, "plain": plain}, path)
    except RuntimeError as error:  # torch's writer raises no OSError where the disk is full
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        torch.serialization.set_crc32_options(checked)


def bytes_of(model: Model) -> int:
    """Bytes of the weights of `model`, packed or not."""
    packed = [weight for _, weights, _ in _parts(model) for weight in weights]
    tensors = [part for weight in packed for part in (weight.panels, weight.scales, weight.bias)]
    return sum(tensor.nbytes for tensor in [*tensors, *model.parameters()])


def _fields(weight: PackedWeight) -> dict[str, Any]:
    fields = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    return fields | {"clamp": weight.clamp and dataclasses.astuple(weight.clamp)}


def _weight(fields: dict[str, Any]) -> PackedWeight:
    return PackedWeight(**fields | {"clamp": fields["clamp"] and ClampedGate(*fields["clamp"])})


def _read(model: Model, path: Path) -> None:
    saved = torch.load(path, mmap=True, weights_only=True)
    setters = {name: use for name, _, use in _parts(model)}
    for name, weights in saved["packed"].items():
        setters[name]([_weight(fields) for fields in weights])
    for name, tensor in saved["plain"].items():
        model.put(name, tensor)
