"""Routers: the routes that a module adds to the application, by decorators of its endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan

E = TypeVar("E", bound=Callable[..., Awaitable[Response]])


class Router:
    """Routes in the order in which their endpoints were decorated.

    An endpoint is called with the request, and by name with the parameters in its path.

    route : class of the routes
    lifespan : context in which the application serves
    """

    def __init__(self, route: type[Route] = Route, lifespan: Lifespan[Starlette] | None = None) -> None:
        self.routes: list[Route] = []
        self.lifespan = lifespan
        self._route = route

    def get(self, path: str) -> Callable[[E], E]:
        return self._adding("GET", path)

    def post(self, path: str) -> Callable[[E], E]:
        return self._adding("POST", path)

    def put(self, path: str) -> Callable[[E], E]:
        return self._adding("PUT", path)

    def delete(self, path: str) -> Callable[[E], E]:
        return self._adding("DELETE", path)

    def _adding(self, method: str, path: str) -> Callable[[E], E]:
        def add(endpoint: E) -> E:
            async def call(request: Request) -> Response:
                return await endpoint(request, **request.path_params)

            self.routes.append(self._route(path, call, methods=[method]))
            return endpoint

        return add
