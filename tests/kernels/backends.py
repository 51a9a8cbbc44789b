"""The operations of a backend, each from its own module.

`ops("cpu")` would compile all of them, which takes 29 s for a processor that is imitated (`test_registry`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

SAME = {
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "rope_store_kv": "rope",
    "copy_pages": "kv_store",
    "gated_delta_rule": "gated_delta",
    "output_gate": "gated_delta",
}


class Backend:
    def __init__(self, name: str, modules: Mapping[str, str]) -> None:
        self.name, self._modules = name, SAME | dict(modules)

    def __getattr__(self, operation: str) -> Any:
        module = importlib.import_module(f"ramify.kernels.{self.name}.{self._modules[operation]}")
        return getattr(module, operation)


CPU = Backend(
    "cpu",
    {
        "linear": "linear",
        "masked_linear": "linear_masked",
        **dict.fromkeys(("rms_norm", "silu_mul", "gelu_mul", "soft_cap", "log_sum"), "rowwise"),
    },
)
TRITON = Backend("triton", {"silu_mul": "activation", "gelu_mul": "activation", "matmul": "matmul"})
TORCH = Backend(
    "reference",
    {
        "linear": "linear",
        "masked_linear": "linear",
        "matmul": "matmul",
        **dict.fromkeys(("silu_mul", "gelu_mul"), "activation"),
        **dict.fromkeys(("soft_cap", "log_sum"), "logits"),
    },
)
