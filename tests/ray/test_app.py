"""The parts of a Ray Serve application, built without a cluster."""

from __future__ import annotations

import pytest

from ramify.errors import UnsupportedField

pytestmark = pytest.mark.ray


def test_scaling_counts_requests_beside_the_session_of_each_replica() -> None:
    """Scaling down works only if the target exceeds the calls of idle replicas: each has one running
    call and its heartbeats."""
    from ramify.ray.app import build

    app = build({"model": "m", "replicas": "1..4", "requests_per_replica": "1"})
    (model,) = app._bound_deployment.init_args[1:]
    scaling = model._bound_deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 4, 2.1)


def test_a_second_frontend_is_refused_by_name() -> None:
    from ramify.ray.app import refuse_several

    refuse_several(1)
    with pytest.raises(UnsupportedField, match="Frontend has num_replicas 2"):
        refuse_several(2)
