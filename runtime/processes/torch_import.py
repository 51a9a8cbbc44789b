"""Imports torch without a third of it that a start on the CPU does not need."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

PUT_OFF = "torch._meta_registrations"
"""Operations on tensors that have a shape and no data: 0.35 s of processor time, and 15 more modules. Without
them torch makes no generators of random numbers, and cannot compile or export."""


def import_torch() -> None:
    """Import torch, if nobody has, without `PUT_OFF`; `import_rest` makes it whole."""
    if "torch" in sys.modules:
        return
    sys.modules[PUT_OFF] = placeholder = ModuleType(PUT_OFF)
    try:
        import torch
    finally:
        del sys.modules[PUT_OFF]
    package, _, name = PUT_OFF.rpartition(".")
    if getattr(torch, name, None) is placeholder:
        delattr(sys.modules[package], name)


def import_rest() -> None:
    """Import what `import_torch` has put off."""
    importlib.import_module(PUT_OFF)
