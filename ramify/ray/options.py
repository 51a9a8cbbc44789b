"""The options of a deployment on a Ray cluster: the server's and the cluster's."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import typing
from collections.abc import Mapping
from typing import Any

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.option_values import from_text, from_value
from ramify.runtime.config import ELSEWHERE, SEVERAL_MODELS, ServerConfig
from ramify.runtime.executor.memory import ON_CPU, ON_CUDA
from ramify.spelling import nearest

OF_SERVE = {
    "host": "Ray Serve listens: give http_options.host in its config file, or `ramify deploy --host`.",
    "port": "Ray Serve listens: give http_options.port in its config file, or `ramify deploy --port`.",
}
"""Options of `ramify serve` that an application of Ray Serve cannot have → remedy."""

ONE_SERVER = (
    "Gateways that read KV events route to servers of one replica each; Ray Serve's frontend routes itself."
)
NOT_HERE = dict.fromkeys(("kv_events", "kv_events_replay", "kv_events_topic"), ONE_SERVER) | {
    "tensor_parallel": "Ramify divides no model on a Ray cluster yet: use `ramify serve --tensor-parallel`.",
    "log_format": "Ray writes the logs of its processes, as the logging_config of Ray Serve says.",
    "prefill_replicas": "Replicas on a Ray cluster have no roles: use `ramify serve`.",
    **dict.fromkeys(SEVERAL_MODELS, "A deployment has one model: use `ramify serve`."),
}
"""Options that a deployment on a Ray cluster cannot have → reason."""

REQUESTS_PER_REPLICA = 0.25
"""Requests per replica that scaling aims at, as a share of `max_running`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Options of the replicas on a Ray cluster."""

    replicas: str = "1"
    """Number of replicas: N, or a range LOW..HIGH. In a range, Ray Serve scales by the number of requests
    that run and wait."""
    cpus_per_replica: float = 1.0
    """Cores that Ray reserves for each replica. Unless `threads` is given, a replica computes with as many
    threads, at least one."""
    gpus_per_replica: float | None = None
    """GPUs that Ray reserves for each replica. None: 1 if `device` is cuda, else 0."""
    requests_per_replica: float | None = None
    """Number of running and waiting requests per replica that scaling aims at. None: a quarter of
    max_running. If max_running is not given either: 32 on the CPU, and 64 with GPUs."""

    def __post_init__(self) -> None:
        self.bounds  # noqa: B018 - raises where it is no number or range
        for name in ("cpus_per_replica", "gpus_per_replica"):
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be 0 or more.")
        if self.requests_per_replica is not None and not 1 <= self.requests_per_replica < math.inf:
            raise ValueError(f"requests_per_replica is {self.requests_per_replica}; it must be 1 or more.")

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most replicas."""
        low, dots, high = self.replicas.partition("..")
        try:
            bounds = (int(low), int(high if dots else low))
        except ValueError:
            bounds = (0, 0)
        if not 1 <= bounds[0] <= bounds[1]:
            raise ValueError(
                f"replicas is {self.replicas!r}; it must be a number of 1 or more, or a range such as 2..8."
            )
        return bounds

    def gpus(self, server: ServerConfig) -> float:
        if self.gpus_per_replica is not None:
            return self.gpus_per_replica
        return 1.0 if server.device == "cuda" else 0.0

    def target(self, server: ServerConfig) -> float:
        """Number of requests per replica that scaling aims at."""
        if self.requests_per_replica is not None:
            return self.requests_per_replica
        # The smallest GPU's value, as the replicas' GPU is not known.
        by_device = ON_CUDA[-1][1] if self.gpus(server) else ON_CPU
        return max(1.0, (server.max_running or by_device.max_running) * REQUESTS_PER_REPLICA)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """The configurations of an application of Ray Serve: the server's and the cluster's."""

    server: ServerConfig
    """The server's configuration. Its `replicas` is the greatest number of replicas, but at least 2, so that
    schedulers publish their prefix trees."""
    cluster: ClusterConfig

    @property
    def most_requests(self) -> int:
        """Most requests in all batches and in the queue together.

        If max_running is not given, that of the largest GPUs is assumed.
        """
        return self.server.most_requests(self.server.max_running or ON_CUDA[0][1].max_running)

    def replica(self) -> Deployment:
        """Configuration of a replica, the same for any number of replicas."""
        return Deployment(
            server=dataclasses.replace(self.server, replicas=2),
            cluster=dataclasses.replace(self.cluster, replicas="1", requests_per_replica=None),
        )

    @property
    def version(self) -> str:
        """Text that differs between two deployments if a replica of one cannot take over requests of the
        other."""
        replica = self.replica()
        text = json.dumps([dataclasses.asdict(one) for one in (replica.server, replica.cluster)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_options(given: Mapping[str, Any]) -> Deployment:
    """Read the options from ``serve run`` or its config file: texts, or values of the right type.

    Raises `UnsupportedField` for an unknown option, with the most similar known one, and `InvalidRequest` for
    a wrong value.
    """
    names = [field.name for field in dataclasses.fields(ServerConfig)]
    names += [field.name for field in dataclasses.fields(ClusterConfig)]
    refused = OF_SERVE | NOT_HERE
    known = [name for name in names if name not in refused]
    hints = typing.get_type_hints(ServerConfig) | typing.get_type_hints(ClusterConfig)
    values: dict[str, Any] = {}
    for spelled, value in given.items():
        name = str(spelled).replace("-", "_")
        if name in refused:
            raise UnsupportedField(f"{name} is no option here.", field=name, remedy=refused[name])
        if name not in known:
            raise UnsupportedField(
                f"There is no option {spelled!r}.", field=name, remedy=nearest(name, known, ELSEWHERE)
            )
        read = from_text if isinstance(value, str) else from_value
        values[name] = read(hints[name], value, name)
    return deployment(values)


def deployment(values: Mapping[str, Any]) -> Deployment:
    """Make the configurations from values of the right types.

    Raises `InvalidRequest` for a wrong value. The address to listen on is checked later, when it is known.
    """
    of_cluster = {field.name for field in dataclasses.fields(ClusterConfig)}
    try:
        cluster = ClusterConfig(**{name: values[name] for name in values if name in of_cluster})
        server = ServerConfig(
            **{name: values[name] for name in values if name not in of_cluster},
            replicas=max(2, cluster.bounds[1]),
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    return Deployment(server=server, cluster=cluster)
