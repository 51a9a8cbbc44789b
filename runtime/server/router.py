"""Routers: the routes that a module adds to the application, by decorators of its endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan

from ramify.runtime.server.service import KEY

E = TypeVar("E", bound=Callable[..., Awaitable[Response]])


class Router:
    """Routes in the order in which their endpoints were decorated.

    An endpoint is called with the request, and by name with the parameters in its path. One that `uses_model`
    is called when the model that the request names is loaded, if the server has several (`Models.acquire`).
    An endpoint is for operators' keys unless it is for `any_key`.

    route : class of the routes
    lifespan : context in which the application serves
    """

    def __init__(self, route: type[Route] = Route, lifespan: Lifespan[Starlette] | None = None) -> None:
        self.routes: list[Route] = []
        self.lifespan = lifespan
        self._route = route

    def get(self, path: str, *, uses_model: bool = False, any_key: bool = False) -> Callable[[E], E]:
        return self._adding("GET", path, uses_model, any_key)

    def post(self, path: str, *, uses_model: bool = True, any_key: bool = False) -> Callable[[E], E]:
        return self._adding("POST", path, uses_model, any_key)

    def put(self, path: str, *, uses_model: bool = True, any_key: bool = False) -> Callable[[E], E]:
        return self._adding("PUT", path, uses_model, any_key)

    def delete(self, path: str, *, any_key: bool = False) -> Callable[[E], E]:
        return self._adding("DELETE", path, False, any_key)

    def _adding(self, method: str, path: str, uses_model: bool, any_key: bool) -> Callable[[E], E]:
        def add(endpoint: E) -> E:
            async def call(request: Request) -> Response:
                KEY.get().check_path(request.scope["path"], any_key=any_key)
                if uses_model and (models := request.app.state.models) is not None:
                    await models.acquire(request)
                return await endpoint(request, **request.path_params)

            self.routes.append(self._route(path, call, methods=[method]))
            return endpoint

        return add
