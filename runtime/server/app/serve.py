"""The server's process: from the configuration to a clean exit.

SIGTERM or Ctrl-C starts the drain, and a line on standard output says so: /health returns 503, and new
generations are refused. Running generations have `ServerConfig.drain_s` seconds to finish. A second signal
ends this wait. Then the engine core is stopped, and the process exits with status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import uvicorn

from ramify.logs import configure_logging
from ramify.loop import cancel_at_end, new_loop
from ramify.runtime.cold.checks import check_folder, host_kv_on_cpu
from ramify.runtime.config import ServerConfig
from ramify.runtime.host_names import ip_address
from ramify.runtime.inspect.machine import this_machine
from ramify.runtime.server.app.notify import keep_alive, notify
from ramify.runtime.server.keys.tenants import Keys
from ramify.spans import tracer_of

if TYPE_CHECKING:
    from ramify.runtime.frontend.frontend import Frontend
    from ramify.runtime.processes.prestart import PrestartedWorkers
    from ramify.runtime.server.models import Models
    from ramify.runtime.server.router import Router
    from ramify.runtime.server.service import FrontendProtocol

IN_USE_REMEDY = "Choose another by --port (0: any that is free), or use the server that is there."

Routes = Callable[[], "Sequence[Router]"]

LAST_BYTES_S = 2.0
"""Seconds that connections may take to send their last bytes after all generations have ended."""

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open. Clients close theirs sooner (Ramify's after 15 s, most proxies
after 60 s), so the server never closes a connection on which a request is being sent."""

PORT_IN_USE = 1
"""Exit status when the address cannot be bound."""


def serve(
    config: ServerConfig,
    routes: Routes = tuple,
    workers: PrestartedWorkers | None = None,
    *,
    notice: Callable[[], None] | None = None,
) -> int:
    """Serve until a signal arrives. Returns the exit status. Raises an error if the engine processes cannot
    be started, `InvalidRequest` if the file of keys is wrong or `cold_dir` can be no folder, and
    `UnsupportedField` for an option that no model could be loaded with.

    `routes` returns additional routers, whose lifespans end before the drain. It is called in a thread while
    the workers start, so it may import large modules. `workers`: processes for the engine core of the first
    replica, if they were started early. `notice`: logs a line as soon as logging is configured.
    """
    configure_logging(config.log_level, config.log_format, "frontend")
    if config.otel:
        tracer_of()  # raises before the model is loaded
    keys = Keys(config)
    check_folder(config)
    if config.keeps_alive and config.host_kv_gb is not None and this_machine(config.device).device == "cpu":
        raise host_kv_on_cpu(config)  # before the first load, which may be much later
    if notice is not None:
        notice()
    try:
        listener = bind(config.host, config.port)
    except OSError as error:
        remedy = f" {IN_USE_REMEDY}" if error.errno == errno.EADDRINUSE else ""
        address = f"{_url_host(config.host)}:{config.port}"
        print(f"ramify: Cannot listen on {address}: {error.strerror}.{remedy}", file=sys.stderr)
        return PORT_IN_USE
    with listener, asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_serve(config, keys, listener, routes, workers))


async def _serve(
    config: ServerConfig,
    keys: Keys,
    listener: socket.socket,
    routes: Routes,
    workers: PrestartedWorkers | None,
) -> int:
    frontend = _frontend(config, workers)
    with stop_signals() as stopping, _reloading(keys):
        start = asyncio.gather(frontend.start(), asyncio.to_thread(_import_application, routes))
        try:
            await _until(stopping, start)
            if not start.done():
                return 0
            _, routers = start.result()
            if not config.keeps_alive:
                _tell_of_defaults(config, frontend)
            port = listener.getsockname()[1]
            url = f"http://{_url_host(config.host)}:{port}"
            await run_server(
                frontend,
                config,
                listener,
                stopping,
                on_ready=lambda: print(
                    f"Serving {_named(frontend)} on {url}{for_others(config.host, port)}", flush=True
                ),
                routers=routers,
                keys=keys,
            )
        finally:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            await frontend.aclose()
    return 0


def _tell_of_defaults(config: ServerConfig, frontend: FrontendProtocol) -> None:
    if config.sampling_defaults == "model" and (named := frontend.info.sampling_defaults):
        values = ", ".join(f"{name} {value:g}" for name, value in named.items())
        print(f"Sampling defaults of the model: {values} (--sampling-defaults none leaves them out)")
    if config.max_output_tokens is None:
        most = f"{frontend.max_prompt_tokens:,} tokens"
        print(f"A chat that names no max_tokens may have {most} (--max-output-tokens N: at most N)")
    if (room := frontend.info.kv_room) is not None:
        print(f"{room.text}." + (" Each replica." if config.replicas > 1 else ""))


def _frontend(config: ServerConfig, workers: PrestartedWorkers | None) -> Frontend | Models:
    """The frontend of the only model, or of all models of a server that loads and unloads them."""
    if not config.keeps_alive:
        from ramify.runtime.frontend.frontend import Frontend

        return Frontend(config, workers)
    from ramify.runtime.server.models import models_of

    return models_of(config, workers)


def _named(frontend: Frontend | Models) -> str:
    names = getattr(frontend, "names", None) or (frontend.info.name,)
    return ", ".join([*names[:8], *([f"{len(names) - 8} others"] if len(names) > 8 else [])])


def _import_application(routes: Routes) -> Sequence[Router]:
    """Import the HTTP application. Called while the model is loaded, since importing takes 0.6 s. Returns the
    additional routers."""
    import ramify.runtime.server.app.app  # noqa: F401

    return routes()


async def run_server(
    frontend: FrontendProtocol,
    config: ServerConfig,
    listener: socket.socket,
    stopping: StopSignal,
    on_ready: Callable[[], None],
    routers: Sequence[Router] = (),
    keys: Keys | None = None,
) -> None:
    """Serve a started `frontend` on `listener` until `stopping` is set, then drain. `keys`: as for
    `create_app`."""
    from ramify.runtime.server.app.app import create_app
    from ramify.runtime.server.app.connection import Connection

    app = create_app(frontend, config, routers, keys)
    server = _Server(
        uvicorn.Config(
            app,
            http=Connection,
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(LAST_BYTES_S),
        ),
        on_ready,
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reloading = contextlib.ExitStack()
    try:
        if keys is None:  # else the caller listens since before the load
            reloading.enter_context(_reloading(app.state.keys))
        alive = asyncio.create_task(keep_alive(lambda: not frontend.gave_up))
        async with cancel_at_end((alive,)), app.router.lifespan_context(app):
            await _until(stopping, serving)
        app.state.service.life.draining = True
        notify("STOPPING=1")
        stopping.clear()
        print(
            f"Draining: running requests have up to {config.drain_s:g} s to end."
            " A second signal (Ctrl-C) ends them at once.",
            flush=True,
        )
        draining = asyncio.create_task(frontend.drain(config.drain_s))
        async with cancel_at_end((draining,)):
            await _until(stopping, draining, serving)
        app.state.service.life.stopped = True
        frontend.abort()
    finally:
        server.should_exit = True
        await serving
        reloading.close()


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket. Port 0 means any free port. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # A socket that is bound and does not listen would let a second server bind the same address.
        listener.listen(2048)
    except BaseException:
        listener.close()
        raise
    return listener


StopSignal = asyncio.Event
"""The event that is set by a signal to stop."""


@contextlib.contextmanager
def stop_signals() -> Iterator[StopSignal]:
    """An event that SIGTERM and SIGINT set. These signals do not end the process within the block."""
    loop = asyncio.get_running_loop()
    stopping = StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        yield stopping
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _reloading(keys: Keys) -> Iterator[None]:
    """Within the block SIGHUP reads the file of keys again. A server without one, which has nothing else to
    read again, goes on, unless it runs in a terminal: there the signal says that the terminal was closed."""
    in_terminal = sys.stdin is not None and sys.stdin.isatty()
    if (keys.path is None and in_terminal) or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, keys.reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


class _Server(uvicorn.Server):
    """The server of uvicorn without its signal handling: the process ends with status 0, not by a signal."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()
        notify("READY=1")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _until(stopping: StopSignal, *others: Awaitable[object]) -> None:
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((stop, *map(asyncio.ensure_future, others)), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()


def for_others(host: str, port: int) -> str:
    """The address that other machines use, in words, if the server listens on all addresses of this one: the
    one from which this machine reaches others. Empty if there is none."""
    if (address := ip_address(host)) is None or not address.is_unspecified:
        return ""
    family, elsewhere = (
        (socket.AF_INET, "192.0.2.1") if address.version == 4 else (socket.AF_INET6, "2001:db8::1")
    )
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect((elsewhere, 9))  # sends nothing: it chooses the route to an address of documentation
        return f"; from other machines: http://{_url_host(route.getsockname()[0])}:{port}"
    return ""


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
