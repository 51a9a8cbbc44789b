"""The files of deploy/ use only metrics, options and paths that exist."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ramify.cli import main
from ramify.cli.flags import add_config_flags, add_model, given_fields
from ramify.messages import SchedulerStats
from ramify.runtime.config import ServerConfig
from ramify.runtime.server.metrics import Metrics
from tests.server.fake_frontend import FakeFrontend, LiveServer

DEPLOY = Path(__file__).parent.parent / "deploy"
PATHS = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
TEXTS = {str(path.relative_to(DEPLOY)): path.read_text(encoding="utf-8") for path in PATHS}


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all(TEXTS[name]))


def kind(name: str, kind: str) -> Any:
    (found,) = [one for one in documents(name) if one["kind"] == kind]
    return found


def exposed() -> dict[str, set[str]]:
    """Name of each metric in /metrics → its labels."""
    metrics = Metrics()
    metrics.responses.labels("/x", "200").inc()
    metrics.generations.labels("/x", "200", "stop").inc()
    for histogram in (metrics.first_token_s, metrics.inter_token_s, metrics.total_s):
        histogram.labels("/x").observe(1.0)
    values = {field.name: 1 for field in msgspec.structs.fields(SchedulerStats)}
    text = metrics.render(SchedulerStats(**values), ["a"]).decode()
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(ramify_\w+)(?:\{(.*)\})? ", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r"(\w+)=\"", labels))
    return found


@pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith((".json", ".yaml"))])
def test_it_is_yaml_or_json(name: str) -> None:
    assert json.loads(TEXTS[name]) if name.endswith(".json") else all(documents(name))


def test_every_metric_exists_with_its_labels() -> None:
    metrics = exposed()
    named = 0
    for name, text in TEXTS.items():
        for metric, labels in re.findall(r"\b(ramify_[a-z0-9_]+)(?:\{([^}]*)\})?", text):
            assert metric in metrics, (name, metric)
            for label in re.findall(r"(\w+)=~?", labels):
                assert label in metrics[metric] | {"instance"}, (name, metric, label)
            named += 1
    assert named > 30
    for text in TEXTS.values():
        for grouped in re.findall(r"by \(([^)]*)\)", text):
            assert set(re.split(r"\W+", grouped)) <= {"instance", "le", "status", "state"}


def test_gateways_read_labels_that_exist() -> None:
    plugins = {one["type"]: one.get("parameters", {}) for one in kind_of_picker()["plugins"]}
    extractor = plugins["core-metrics-extractor"]
    (engine,) = extractor["engineConfigs"]
    labels = exposed()[engine["cacheInfoSpec"]]
    assert {engine["cacheBlockSizeLabelName"], engine["cacheNumBlocksLabelName"]} <= labels
    assert exposed()[engine["loraSpec"]] == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    pod = kind("kubernetes/ramify.yaml", "Deployment")["spec"]["template"]
    assert pod["metadata"]["labels"]["llm-d.ai/engine-type"] == engine["name"] == extractor["defaultEngine"]
    producer = plugins["precise-prefix-cache-producer"]
    discovery = producer["kvEventsConfig"]["podDiscoveryConfig"]
    config = served()
    assert config.kv_events == f"tcp://*:{discovery['socketPort']}"
    assert config.kv_events_replay == f"tcp://*:{discovery['replaySocketPort']}"
    assert producer["tokenProcessorConfig"]["blockSizeTokens"] == config.page_size
    assert config.kv_events_topic is None, "kv@…, for which the picker asks"
    key, value = discovery["podLabelSelector"].split("=")
    assert pod["metadata"]["labels"][key] == value


def kind_of_picker() -> Any:
    return kind("kubernetes/llm-d.yaml", "EndpointPickerConfig")


def container() -> Any:
    (found,) = kind("kubernetes/ramify.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def served() -> ServerConfig:
    """The configuration that the manifest's arguments give, without the key, which is in the environment."""
    return configured(container()["args"])


def configured(arguments: list[str]) -> ServerConfig:
    command, *flags = arguments
    assert command == "serve"
    parser = argparse.ArgumentParser()
    add_model(parser)
    add_config_flags(parser, ServerConfig)
    return ServerConfig(**given_fields(parser.parse_args(flags), ServerConfig))


def test_the_servers_flags_and_ports_are_right() -> None:
    config, found = served(), container()
    ports = {port["name"]: port["containerPort"] for port in found["ports"]}
    assert ports == {"http": config.port, "kv-events": 5557, "kv-replay": 5558}
    assert [one["name"] for one in found["env"]] == ["RAMIFY_API_KEY"]
    pod = kind("kubernetes/ramify.yaml", "Deployment")["spec"]["template"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > config.drain_s
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(config.port)
    exposed_ports = re.findall(r"^EXPOSE (.*)$", TEXTS["Containerfile"], re.MULTILINE)
    assert exposed_ports == [" ".join(map(str, ports.values()))]


def test_an_image_is_built_from_all_sources_and_from_no_environment() -> None:
    root = DEPLOY.parent
    ignored = {line for line in (root / ".dockerignore").read_text().splitlines() if line[:1] != "#"}
    project = tomllib.loads((root / "pyproject.toml").read_text())
    folders = set(project["tool"]["setuptools"]["package-dir"].values())
    assert not ignored & {*folders, "pyproject.toml", project["project"]["readme"], "LICENSE"}
    assert {".git", ".venv*", "*.gguf"} <= ignored


def test_probes_are_answered_without_the_key() -> None:
    probes = {
        name: container()[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")
    }
    assert probes == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/livez"}
    import httpx

    with LiveServer(FakeFrontend(), api_key="k", open_metrics=served().open_metrics) as server:
        for path in {*probes.values(), "/metrics"}:
            assert httpx.get(server.url + path, headers={"host": "10.1.2.3:30000"}).status_code == 200
        server.frontend.healthy = False  # an engine core restarts
        assert httpx.get(server.url + probes["liveness"]).status_code == 200
        assert httpx.get(server.url + probes["readiness"]).status_code == 503


def test_the_ray_service_has_options_that_exist() -> None:
    config = yaml.safe_load(kind("kuberay/rayservice.yaml", "RayService")["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    assert application["import_path"] == "ramify.ray.app:build"
    options = pytest.importorskip("ramify.ray.options", reason="ramify.ray.options is not there")
    deployment = options.read_options(application["args"])
    assert deployment.cluster.bounds == (2, 8)
    assert dataclasses.asdict(deployment.server)["model"] == application["args"]["model"]


def unit() -> dict[str, list[str]]:
    """Setting of the systemd unit → its values."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", TEXTS["systemd/ramify.service"], re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def test_the_unit_starts_a_server_with_the_key_of_its_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ExecStart with the unit's environment, by the folders that systemd would give it."""
    settings = unit()
    assert settings["LoadCredential"] == ["api-key:/etc/ramify/api-key"]
    (tmp_path / "api-key").write_text("s3cret\n")
    (tmp_path / "ramify.toml").write_text('model = "/srv/model"\nhost = "0.0.0.0"\n')
    for variable in settings["Environment"]:
        name, _, value = variable.partition("=")
        monkeypatch.setenv(name, value.replace("%d", str(tmp_path)))
    (command,) = settings["ExecStart"]
    program, *arguments = command.replace("/etc/ramify", str(tmp_path)).split()
    assert program.endswith("/bin/ramify")
    assert main.main([*arguments, "--print-config"]) == 0
    out = capsys.readouterr().out
    assert f'model = "/srv/model"  # {tmp_path}/ramify.toml, line 1\n' in out
    assert f'api_key_file = "{tmp_path}/api-key"  # RAMIFY_API_KEY_FILE\n' in out
    assert 'log_format = "json"  # --log-format\n' in out
    assert "s3cret" not in out


def test_the_unit_waits_for_the_drain() -> None:
    settings = unit()
    assert settings["Type"] == ["notify"]
    assert int(settings["TimeoutStopSec"][0]) > ServerConfig().drain_s
    assert "MemoryDenyWriteExecute" not in settings, "kernels are compiled at run time"


def pods() -> list[Any]:
    """The pods of the Ray cluster, as manifests of pods."""
    cluster = kind("kuberay/rayservice.yaml", "RayService")["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
    return [pod | {"spec": group["template"]["spec"]} for group in groups]


def test_the_manifests_are_valid_by_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate").validate
    found = [*documents("kubernetes/ramify.yaml"), *pods()]
    assert len(found) == 5
    for document in found:
        validate(document, "1.37", strict=True)
    wrong = pods()[0]
    wrong["spec"]["container"] = []
    with pytest.raises(Exception, match="container"):
        validate(wrong, "1.37", strict=True)


TOOLS = {
    "promtool": ["check", "rules", "prometheus/alerts.yaml"],
    "hadolint": ["Containerfile"],
    "systemd-analyze": ["verify", "systemd/ramify.service"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_accept_it(tool: str) -> None:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (found := shutil.which(tool, path=places)) is None:
        pytest.skip(f"needs {tool}")
    done = subprocess.run([found, *TOOLS[tool]], cwd=DEPLOY, capture_output=True, text=True, check=False)
    said = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if not line.endswith("/ramify is not executable: No such file or directory")
    ]
    assert said == [] if tool == "systemd-analyze" else done.returncode == 0, said
