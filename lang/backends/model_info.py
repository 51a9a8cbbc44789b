"""Information about a backend's model, which is requested once, and the revisions of the LoRA adapters."""

from __future__ import annotations

import weakref

from ramify.lang.backends.base import Backend
from ramify.lang.backends.router import Router, default_of
from ramify.model_info import ModelInfo

_infos: weakref.WeakKeyDictionary[Backend, ModelInfo] = weakref.WeakKeyDictionary()


def cached_model_info(backend: Backend) -> ModelInfo | None:
    """The result of the last `model_info` for this backend; None if there is no such result."""
    return _infos.get(default_of(backend))


def forget_model_info(backend: Backend) -> None:
    """Forget the result of `model_info`, so that the next run requests it again."""
    _infos.pop(backend, None)


async def model_info(backend: Backend) -> ModelInfo:
    """The backend's model information, requested once. Runs on the background loop."""
    backend = default_of(backend)
    info = _infos.get(backend)
    if info is None:
        info = _infos[backend] = await backend.info()
    return info


async def lora_revisions(backend: Backend) -> dict[str, str]:
    """Name → revision of the LoRA adapters of a backend, or of all backends of a router. A revision changes
    with the adapter's weights."""
    found: dict[str, str] = {}
    parts = backend.backends if isinstance(backend, Router) else {"": backend}
    for name, part in parts.items():
        ask = getattr(part, "lora_revisions", None)
        revisions = {} if ask is None else await ask()
        found |= {f"{name} {lora}".strip(): revision for lora, revision in revisions.items()}
    return found
