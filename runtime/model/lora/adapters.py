"""The LoRA adapters that a model has loaded."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from ramify.errors import InvalidRequest, Overloaded, UnsupportedField, WorkerDied
from ramify.kernels.weights.lora import MOST_SLOTS, LoraTable, LoraWeight
from ramify.runtime.lora_names import unknown
from ramify.runtime.model.causal_lm import CausalLM
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.layers import Linear, Slot
from ramify.runtime.model.lora.peft import Delta, PeftAdapter, read_adapter
from ramify.runtime.model.weights import copy_rows


@dataclasses.dataclass(eq=False)
class Adapter:
    """An adapter in a slot of the model's tables. The slot is freed with the object's last reference."""

    name: str
    path: str
    revision: str
    """A digest that changes with the adapter's files."""
    slot: int
    base: str
    """The name of the base model in the adapter's config; may be empty."""


def free_bytes(device: torch.device) -> int | None:
    """The free memory of a GPU; None for other devices, whose memory the operating system can page out."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


class Adapters:
    """Loaded adapters by name. A request that uses an unloaded adapter keeps it until the request ends."""

    def __init__(self, model: CausalLM, free: Callable[[torch.device], int | None] = free_bytes) -> None:
        """`free` returns the bytes that a device has for adapters; None: without limit."""
        self._model, self._free_bytes = model, free
        self._loaded: dict[str, Adapter] = {}
        self.slots: set[int] = set()

    def find(self, name: str, revision: str = "") -> Adapter:
        """The adapter `name`.

        Raises `NotFound`, with the names of all loaded adapters, if it is not loaded, and `WorkerDied` if
        `revision` is given and is not the adapter's.
        """
        if name not in self._loaded:
            raise unknown(name, self._loaded)
        found = self._loaded[name]
        if revision not in ("", found.revision):
            raise WorkerDied(
                f"The request cannot go on: its LoRA adapter {name!r} has changed.",
                field="lora",
                remedy="Send it again.",
            )
        return found

    def load(self, name: str, path: str) -> Adapter:
        """Load the PEFT folder at `path` as `name`.

        Raises `InvalidRequest` for a name that is in use and for a folder that does not fit the model,
        `UnsupportedField` for features of the adapter that are not supported, and `Overloaded` if no slot is
        free or too little of a GPU's memory.
        """
        if name in self._loaded:
            raise InvalidRequest(
                f"The adapter {name!r} is loaded already.", field="name", remedy="Unload it first."
            )
        free = [slot for slot in range(MOST_SLOTS) if slot not in self.slots]
        if not free:
            raise Overloaded(f"{MOST_SLOTS} adapters are loaded or still in use.", remedy="Unload one.")
        found = read_adapter(Path(path).expanduser())
        weights = self._weights(found, path)
        adapter = Adapter(name, path, found.revision, free[0], found.config.base_model_name_or_path or "")
        for table, weight in weights:
            table[adapter.slot] = weight
        self.slots.add(adapter.slot)
        tables = [table for table, _ in weights]
        weakref.finalize(adapter, _free, tables, self.slots, adapter.slot).atexit = False
        self._loaded[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """Forget the name, so that new requests cannot use it. Requests that use the adapter keep it until
        they end. Raises `NotFound` for an unknown name."""
        self.find(name)
        del self._loaded[name]

    def _weights(self, adapter: PeftAdapter, path: str) -> list[tuple[LoraTable, LoraWeight]]:
        if isinstance(self._model, Model) and self._model.config.shard.count > 1:
            raise UnsupportedField(
                f"The adapter {path} cannot be loaded: tensor_parallel is {self._model.config.shard.count}, "
                "and adapters are not divided among ranks.",
                field="lora",
                remedy="Merge the adapter into the checkpoint, or leave tensor_parallel out.",
            )
        slots = dict(self._model.slots())
        deltas = {
            self._model.name_of(f"{name}.weight") or name: delta for name, delta in adapter.deltas.items()
        }
        for name in deltas:
            if name not in slots or slots[name].part is None:
                raise UnsupportedField(
                    f"The adapter {path} is not supported: it changes {name}, which is no projection that "
                    "adapters can change here.",
                    field="path",
                    remedy="Merge the adapter into the checkpoint.",
                )
        to = next(slot.part[0].weight for name, slot in slots.items() if name in deltas and slot.part)
        needed = sum(delta.a.numel() + delta.b.numel() for delta in deltas.values()) * to.itemsize
        free = self._free_bytes(to.device)
        if free is not None and needed > free:
            raise Overloaded(
                f"The adapter {path} needs {needed / 1e6:.1f} MB of the device's memory, of which "
                f"{free / 1e6:.1f} MB are free.",
                remedy="Unload one, or give the engine a smaller memory_fraction.",
            )
        found: dict[Linear, dict[str, tuple[int, torch.Tensor, torch.Tensor, float]]] = {}
        for name, slot in slots.items():
            if slot.part is None:
                continue
            targeted = adapter.config.targets(name.removesuffix(".weight"))
            if targeted is not None and targeted != (name in deltas):
                has = "has tensors of" if name in deltas else "lacks the tensors of"
                raise InvalidRequest(
                    f"The adapter {path} cannot be loaded: its file {has} {name}, and its config says "
                    "otherwise.",
                    field="path",
                )
            if name in deltas:
                linear, part = slot.part
                found.setdefault(linear, {})[part] = _part(
                    linear, part, slot, deltas[name], f"{path}: {name}"
                )
        return [(linear.lora, LoraWeight.from_parts(list(parts.values()))) for linear, parts in found.items()]


def _part(
    linear: Linear, part: str, slot: Slot, delta: Delta, what: str
) -> tuple[int, torch.Tensor, torch.Tensor, float]:
    """(first row, A, B, scale) of one projection, with the rows of B in the order of the model's matrix."""
    start = 0
    for name, rows in linear.parts.items():
        if name == part:
            break
        start += rows
    wanted = (rows, linear.inputs)
    if (given := (delta.b.shape[0], delta.a.shape[1])) != wanted:
        raise InvalidRequest(
            f"The adapter {what} is a change of {given}; the model's matrix is {wanted}.",
            field="path",
            remedy="Load the adapter of this model.",
        )
    to = linear.weight
    b = torch.empty(delta.b.shape, dtype=to.dtype, device=to.device)
    copy_rows(Slot(b, slot.rotary, order=slot.order), delta.b, "halves")
    a = delta.a.to(to.device, to.dtype)
    if not (a.float().norm() * b.float().norm() * delta.scale).isfinite():  # NaN and infinity spread
        raise InvalidRequest(
            f"The adapter {what} has values that are not finite in {to.dtype}, or a scale ({delta.scale:g}) "
            "with which its change is not.",
            field="path",
        )
    return start, a, b, delta.scale


def _free(tables: list[LoraTable], slots: set[int], slot: int) -> None:
    for table in tables:
        del table[slot]
    slots.discard(slot)
