"""Random LoRA adapters as PEFT saves them, and the checkpoint that each makes when it is merged."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Path,
    *,
    seed: int,
    targets: Iterable[str] = ALL,
    rank: int = 4,
    alpha: float = 8,
    layers: Iterable[int] | None = None,
    size: float = 0.3,
    **config: Any,
) -> Path:
    """An adapter of the checkpoint in `base`: of the modules whose names end in one of `targets`."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        layer = re.search(r"\.layers\.(\d+)\.", module)
        if not module.endswith(tuple(f".{target}" for target in targets)):
            continue
        if layers is not None and (layer is None or int(layer[1]) not in layers):
            continue
        own = config.get("rank_pattern", {}).get(module.rpartition(".")[2], rank)
        for part, shape in (("A", (own, weight.shape[1])), ("B", (weight.shape[0], own))):
            values = torch.randn(shape, generator=generator) * size
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets)}
    if layers is not None:
        about["layers_to_transform"] = list(layers)
    (folder / "adapter_config.json").write_text(json.dumps(about | config))
    return folder


def merge(folder: Path, base: Path, adapter: Path, scales: dict[str, float] | float) -> Path:
    """A checkpoint in `folder`: each W of `base` is W + scale · B A. `scales` by the last part of a module's
    name."""
    shutil.copytree(base, folder)
    weights, deltas = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in list(weights):
        module = name.removesuffix(".weight")
        a = deltas.get(f"base_model.model.{module}.lora_A.weight")
        if a is not None:
            b = deltas[f"base_model.model.{module}.lora_B.weight"]
            scale = scales if isinstance(scales, float) else scales[module.rpartition(".")[2]]
            weights[name] = (weights[name].double() + scale * (b.double() @ a.double())).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
