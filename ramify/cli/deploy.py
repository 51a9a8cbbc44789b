"""`ramify deploy`."""

from __future__ import annotations

import argparse
import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ramify.cli.flags import add_config_flags, add_model, given_fields
from ramify.errors import EngineError, InvalidRequest, UnsupportedField
from ramify.runtime.config import ServerConfig

if TYPE_CHECKING:
    from ramify.ray.options import Deployment

NAME = "ramify"
NO_CLUSTER = "Could not find any running Ray instance"
"""A part of the message of Ray's error on a machine that belongs to no cluster."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ramify.ray.options import NOT_HERE, ClusterConfig

    add_model(parser)
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="The Ray cluster: its head node. Without it, the cluster that this machine is part "
        "of; if there is none, a cluster is started here, and ends with this command.",
    )
    parser.add_argument(
        "--name",
        metavar="NAME",
        default=NAME,
        help="The application's name in the cluster. (default: %(default)s)",
    )
    parser.add_argument("--stop", action="store_true", help="End the application of this name.")
    add_config_flags(parser, ClusterConfig, others=[ServerConfig])
    own = {field.name for field in dataclasses.fields(ClusterConfig)}
    names = {field.name for field in dataclasses.fields(ServerConfig)} - own - set(NOT_HERE)
    add_config_flags(parser, ServerConfig, names)


def run_command(options: argparse.Namespace) -> int:
    from ramify.ray.installed import require
    from ramify.ray.options import ClusterConfig, deployment

    if (options.address or "").startswith("ray://"):
        raise UnsupportedField(
            "ray:// addresses (Ray Client) are not supported.",
            field="address",
            remedy="Run this on a machine of the cluster, with HOST:PORT of the head node.",
        )
    values = given_fields(options, ServerConfig) | given_fields(options, ClusterConfig)
    wanted = deployment(values)
    ray, serve = require(), require("ray.serve")
    with _cluster(ray, options.address, start=not options.stop) as local:
        if options.stop:
            return _stop(serve, options.name)
        host, port = _listen(serve, wanted, values)
        _deploy(serve, wanted, options.name)
        low, high = wanted.cluster.bounds
        count = (
            "1 replica" if high == 1 else f"{low} replicas" if low == high else f"{low} to {high} replicas"
        )
        print(f"Serving {wanted.server.model} on http://{host}:{port} ({count})", flush=True)
        address = f" --address {options.address}" if options.address else ""
        name = f" --name {options.name}" if options.name != NAME else ""
        if not local:
            print(f"Stop it with: ramify deploy --stop{name}{address}", flush=True)
            return 0
        print("Stop it with Ctrl-C", flush=True)
        try:
            threading.Event().wait()
        finally:
            serve.delete(options.name)
    return 0


@contextmanager
def _cluster(ray: Any, address: str | None, *, start: bool) -> Iterator[bool]:
    """Connect to a Ray cluster for the block.

    Yields True if this process started the cluster; the cluster then ends with the block.
    """
    local = False
    try:
        ray.init(address=address or "auto", namespace="serve", log_to_driver=False)
    except ConnectionError as error:
        local = address is None and start and NO_CLUSTER in str(error)
        if not local:
            raise _unreachable(address, error) from None
        ray.init(address="local", namespace="serve", log_to_driver=False)
    try:
        yield local
    finally:
        ray.shutdown()


def _unreachable(address: str | None, error: Exception) -> InvalidRequest:
    if "AuthToken" in f"{error} {error.__cause__}":
        return InvalidRequest(
            "The Ray cluster asks for its token.",
            field="address",
            remedy="Set RAY_AUTH_MODE=token, with the cluster's token in ~/.ray/auth_token.",
        )
    return InvalidRequest(
        f"There is no Ray cluster at {address or 'this machine'}: {str(error).splitlines()[0]}",
        field="address",
        remedy="Start one with `ray start --head`; other machines join with `ray start --address`.",
    )


def _listen(serve: Any, wanted: Deployment, values: dict[str, Any]) -> tuple[str, int]:
    """Start Ray Serve, unless it runs already. Returns the host and the port on which it listens.

    Raises `InvalidRequest` if `values` asks for another host or port, or if the address needs an API key and
    there is none.
    """
    serve.start(http_options={"host": wanted.server.host, "port": wanted.server.port})
    from ramify.ray.app import http_options, listening

    host, port = http_options()
    for field, found in (("host", host), ("port", port)):
        if values.get(field, found) != found:
            raise InvalidRequest(
                f"Ray Serve runs on this cluster already, and its {field} is {found!r}.",
                field=field,
                remedy=f"Leave --{field} out, or end it with `serve shutdown` first.",
            )
    try:
        listening(wanted.server, host)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    return host or "localhost", port


def _deploy(serve: Any, wanted: Deployment, name: str) -> None:
    from ramify.ray.app import application

    try:
        serve.run(application(wanted), name=name)
    except RuntimeError as error:
        raise EngineError(
            f"The application {name} could not be deployed: {error}",
            remedy="`serve status` says more, and the actors' logs in /tmp/ray/session_latest/logs/serve.",
        ) from None


def _stop(serve: Any, name: str) -> int:
    if name not in serve.status().applications:
        raise InvalidRequest(f"There is no application {name!r} on this cluster.", field="name")
    serve.delete(name)
    print(f"Stopped {name}", flush=True)
    return 0
