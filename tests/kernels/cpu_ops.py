"""The CPU's operations, each from its own module: `ops("cpu")` compiles all of them, which takes 29 s for
a processor that is imitated (`test_registry`)."""

from __future__ import annotations

import importlib
from typing import Any

MODULES = {
    "linear": "linear",
    "masked_linear": "linear_masked",
    "rms_norm": "norm",
    "rope_store_kv": "rope",
    "gated_delta_rule": "gated_delta",
    "output_gate": "gated_delta",
    "silu_mul": "rowwise",
    "gelu_mul": "rowwise",
    "soft_cap": "rowwise",
    "log_sum": "rowwise",
}


class CpuOps:
    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(f"ramify.kernels.cpu.{MODULES[name]}")
        return getattr(module, name)


CPU = CpuOps()
