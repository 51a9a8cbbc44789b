"""Several named backends, from which each step of a program chooses one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any

from ramify.errors import InvalidRequest, UnsupportedField, UnsupportedNode
from ramify.lang.backends.base import Backend
from ramify.loop import wait
from ramify.messages import Generate, TextChunk
from ramify.model_info import ModelInfo
from ramify.spelling import nearest


class Router:
    """A backend made of named backends. A step of a program that runs on a router may name its backend:
    ``gen(..., backend="big")``.

    A step without `backend` runs on the default backend. Methods that are not part of `Backend`, such as
    `flush_cache`, are passed on to the default backend.

    Args:
        backends: Name → backend.
        default: Name of the default backend; None for the first in `backends`.

    Raises `InvalidRequest` if `default` is not a name in `backends`.
    """

    def __init__(self, backends: Mapping[str, Backend], default: str | None = None) -> None:
        self.backends = dict(backends)
        if not self.backends:
            raise InvalidRequest("A Router needs at least one backend.", field="backends")
        for name, backend in self.backends.items():
            if isinstance(backend, Router) or not isinstance(backend, Backend):
                raise InvalidRequest(
                    f"{name!r} is {backend!r}, which a Router cannot hold; it holds backends.",
                    field=f"backends.{name}",
                )
        self.default = next(iter(self.backends)) if default is None else default
        self.pick(self.default, field="default")

    def pick(self, name: str, *, field: str = "backend") -> Backend:
        """The backend called `name`. Raises `InvalidRequest`, with the most similar name, if there is
        none."""
        if name not in self.backends:
            remedy = nearest(name, list(self.backends)) or f"It has {', '.join(self.backends)}."
            raise InvalidRequest(f"The Router has no backend {name!r}.", field=field, remedy=remedy)
        return self.backends[name]

    def on(self, name: str) -> Router:
        """A router over the same backends whose default backend is `name`."""
        self.pick(name)
        return Router(self.backends, name)

    def model(self, name: str) -> Backend:
        """The backend called `name`, else the model of the default backend that has this name."""
        default = self.pick(self.default)
        if name not in self.backends and _has_models(default):
            with contextlib.suppress(UnsupportedField):  # an engine of one model
                return model_of(default, name)
        return self.pick(name, field="model")

    def name_of(self, backend: Backend) -> str | None:
        """The name of `backend`; None if `backend` is not in the router."""
        return next((name for name, one in self.backends.items() if one is backend), None)

    # --- a backend: the default one ---

    async def info(self) -> ModelInfo:
        return await self.pick(self.default).info()

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        return self.pick(self.default).generate(request)

    async def end_program(self, program: str) -> None:
        await self.pick(self.default).end_program(program)

    async def aclose(self) -> None:
        """Close all backends."""
        results = await asyncio.gather(
            *(backend.aclose() for backend in self.backends.values()), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "backends" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.pick(self.default), name)

    # --- for users ---

    def close(self) -> None:
        """Close all backends."""
        wait(self.aclose())

    def __enter__(self) -> Router:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _has_models(backend: Backend) -> bool:
    return hasattr(backend, "model")


def model_of(backend: Backend, name: str) -> Backend:
    """The backend of the model `name` of `backend`. Raises `UnsupportedNode` if `backend` has one model, and
    as far as the names are known `InvalidRequest` or `NotFound` for an unknown name."""
    if not _has_models(backend):
        raise UnsupportedNode(
            f"{type(backend).__name__} has one model, so model={name!r} names none of it.",
            field="model",
            remedy="Leave model out, or run on rm.Engine(models={…}) or a server of several models.",
        )
    found: Backend = backend.model(name)  # type: ignore[attr-defined]
    return found


def on_model(backend: Backend, name: str) -> Backend:
    """`backend` with the model `name` as that of all steps that name none. A router keeps its other
    backends."""
    if not isinstance(backend, Router):
        return model_of(backend, name)
    if name in backend.backends:
        return backend.on(name)
    return Router({**backend.backends, name: backend.model(name)}, name)


def default_of(backend: Backend) -> Backend:
    """The default backend if `backend` is a router; else `backend` itself."""
    return backend.pick(backend.default) if isinstance(backend, Router) else backend
