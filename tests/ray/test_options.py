"""The options of a deployment: texts of ``serve run``, values of a config file, flags of `ramify deploy`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.ray.options import read_options


def test_texts_become_values() -> None:
    found = read_options(
        {
            "model": "m",
            "replicas": "2..8",
            "max-running": "64",
            "kv_memory_gb": "0.5",
            "cascade": "none",
            "lora_loading": "True",
            "dtype": "float32",
            "loras": "a=/one,b=/two",
            "cpus_per_replica": "0.5",
        }
    )
    server, cluster = found.server, found.cluster
    assert (server.model, server.max_running, server.kv_memory_gb, server.cascade) == ("m", 64, 0.5, None)
    assert (server.lora_loading, server.dtype, server.loras) == (True, "float32", {"a": "/one", "b": "/two"})
    assert cluster.bounds == (2, 8)
    assert server.replicas == 8, "the queue's limit is that of all replicas"
    assert (cluster.cpus_per_replica, cluster.target(server)) == (0.5, 16.0)


def test_values_of_a_config_file_are_taken_as_they_are() -> None:
    found = read_options({"replicas": 3, "loras": {"a": "/one"}, "threads": 2, "requests_per_replica": 4})
    assert found.cluster.bounds == (3, 3)
    assert (found.server.loras, found.server.threads) == ({"a": "/one"}, 2)
    assert found.cluster.target(found.server) == 4.0


def test_one_replica_tells_of_its_tree_too() -> None:
    assert read_options({}).cluster.bounds == (1, 1)
    assert read_options({}).server.replicas == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"replica": "2"}, "Did you mean replicas"),
        ({"tensor_parallel_sise": "2"}, "There is no option 'tensor_parallel_sise'"),
        ({"max_model_len": "9"}, "Here it is context_length"),
        ({"port": "80"}, "http_options.port"),
        ({"host": "::"}, "http_options.host"),
        ({"kv_events": "tcp://127.0.0.1:1"}, "kv_events is no option here"),
        ({"tensor_parallel": "2"}, "tensor_parallel is no option here"),
        ({"prefill_replicas": "1"}, "prefill_replicas is no option here"),
        ({"replicas": "8..2"}, "a range such as 2..8"),
        ({"replicas": "0"}, "a range such as 2..8"),
        ({"replicas": "many"}, "a range such as 2..8"),
        ({"max_running": "many"}, "max_running is 'many'; it must be a whole number"),
        ({"cascade": "maybe"}, "must be true or false"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"loras": "a"}, "name=path"),
        ({"rope_scaling": "{1"}, "JSON"),
        ({"gpus_per_replica": "-1"}, "must be 0 or more"),
        ({"requests_per_replica": "0.5"}, "must be 1 or more"),
    ],
)
def test_what_is_wrong_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says.replace("?", r"\?").replace("..", r"\.\.")) as refused:
        read_options(given)
    if "There is no option" in str(refused.value):
        assert isinstance(refused.value, UnsupportedField)


def test_a_replica_has_a_gpu_where_the_device_is_cuda() -> None:
    assert [
        read_options(given).cluster.gpus(read_options(given).server)
        for given in ({}, {"device": "cuda"}, {"device": "cuda", "gpus_per_replica": "0.5"})
    ] == [0.0, 1.0, 0.5]


def test_another_deployment_has_another_version() -> None:
    one, same, other = (read_options({"model": model}) for model in ("a", "a", "b"))
    assert one.version == same.version != other.version
    assert read_options({"model": "a", "replicas": "2..8"}).version == one.version
    assert read_options({"model": "a", "max_running": 3}).version != one.version


def test_an_extension_keeps_its_numbers() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "truncate": False}
    for given in (scaling, json.dumps(scaling)):
        assert read_options({"rope_scaling": given}).server.rope_scaling == scaling
