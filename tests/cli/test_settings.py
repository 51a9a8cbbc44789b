"""Options from a file, from the environment and from flags: one set of names, types and checks."""

from __future__ import annotations

import dataclasses
import os
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ramify.cli import main
from ramify.cli.settings import OTHER_VARIABLES, PREFIX
from ramify.option_values import bare, from_text, from_value
from ramify.runtime.config import SEVERAL_MODELS, ServerConfig
from ramify.runtime.server.keys.file import new_key


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX) and name != "RAMIFY_HOME"]:
        monkeypatch.delenv(name)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, command: str = "serve") -> str:
    """The output of --print-config."""
    status = main.main([command, *arguments, "--print-config"])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main.main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_flags_win_over_variables_and_variables_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ramify.toml"
    file.write_text("# first\npage-size = 8\nmax_running = 8\nthreads = 8\n\n[loras]\na = '/one'\n")
    monkeypatch.setenv("RAMIFY_MAX_RUNNING", "16")
    monkeypatch.setenv("RAMIFY_THREADS", "16")
    lines = printed(capsys, "--config", str(file), "--threads", "32").splitlines()
    assert f"page_size = 8  # {file}, line 2" in lines
    assert "max_running = 16  # RAMIFY_MAX_RUNNING" in lines
    assert "threads = 32  # --threads" in lines
    assert f'loras = {{"a" = "/one"}}  # {file}, line 6' in lines
    assert "port = 30000  # default" in lines
    monkeypatch.setenv("RAMIFY_CONFIG", str(file))
    assert f"page_size = 8  # {file}, line 2" in printed(capsys)


def sample(name: str, kind: Any) -> tuple[str, Any]:
    """(text, value) of a field, valid together with the samples of all others and no default."""
    special: dict[str, Any] = {
        "rope_scaling": ('{"rope_type": "linear", "factor": 2.0}', {"rope_type": "linear", "factor": 2.0}),
        "prefill_replicas": ("0", 0),
        "tensor_parallel": ("1", 1),  # more does not go with cold_dir
        "prefix_cache": ("radix", "radix"),
        "port": ("31400", 31400),
        "kv_events": ("tcp://*:7", "tcp://*:7"),
        "kv_events_replay": ("tcp://*:8", "tcp://*:8"),
        "api_key_file": None,
        "keep_alive": ("1h30m", "1h30m"),
    }
    if name in special:
        return special[name]
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)[-1], typing.get_args(kind)[-1]
    if typing.get_origin(kind) is Sequence:
        part = typing.get_args(kind)[0]
        names = list(typing.get_args(part)[:2]) or ["a", "b"]
        return ",".join(names), names
    if kind == Mapping[str, str]:
        return "a=x,b=y", {"a": "x", "b": "y"}
    by_type = {int: ("7", 7), float: ("0.5", 0.5), bool: ("on", True)}
    return by_type.get(kind, ('*"\\\x7f', '*"\\\x7f'))


@pytest.mark.parametrize("several", [False, True], ids=["one model", "several models"])
def test_every_field_of_the_server_has_a_variable_and_goes_through_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], several: bool
) -> None:
    """Without a list by hand: a new field is covered as it is added."""
    hints = typing.get_type_hints(ServerConfig)
    keys = tmp_path / "keys.toml"
    keys.write_text(new_key("alice")[1])
    given = {}
    for field in dataclasses.fields(ServerConfig):
        if several != (field.name in SEVERAL_MODELS):  # they go with few of the others
            continue
        if (found := sample(field.name, bare(hints[field.name]))) is None:
            continue
        if field.name in ("host", "allowed_hosts", "cors", "log_level", "model"):
            found = ("critical",) * 2 if field.name == "log_level" else ("*",) * 2
        if field.name == "keys":
            found = (str(keys), str(keys))
        text, value = found
        assert from_text(hints[field.name], text, field.name) == value
        assert from_value(hints[field.name], value, field.name) == value
        monkeypatch.setenv(PREFIX + field.name.upper(), text)
        given[field.name] = value
    out = printed(capsys, "--show-secrets")
    assert {name: tomllib.loads(out)[name] for name in given} == given
    assert out.count("# RAMIFY_") == len(given)
    file = tmp_path / "all.toml"
    file.write_text(out)
    for name in given:
        monkeypatch.delenv(PREFIX + name.upper())
    again = printed(capsys, "--show-secrets", "--config", str(file))
    assert {name: tomllib.loads(again)[name] for name in given} == given
    assert again.count(f"# {file}, line ") == len(tomllib.loads(out))


def test_what_serve_refuses_before_it_looks_for_models_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(new_key("default")[1])
    for given, told in (
        (["--keep-alive", "xyz"], "keep_alive is 'xyz'"),
        (["--keys", str(tmp_path / "no.toml")], "no.toml cannot be read"),
        (["--keys", str(keys), "--api-key", "k"], "keys.default is the key of --api-key"),
        (["--cold-gb", "5"], "cold_gb is 5 and cold_dir is not set"),
        (["--api-key", " "], "api_key is empty"),
        (["--drain-s", "-1"], "drain_s is -1"),
        (["--grammar-timeout-s", "0"], "grammar_timeout_s is 0"),
        *(([flag, "nan"], "nan; it must be a number") for flag in ("--drain-s", "--max-lease-s")),
        (["--grammar-timeout-s", "nan"], "grammar_timeout_s is nan"),
    ):
        assert told in refused(capsys, "serve", *given, "--print-config")


def test_keys_are_hidden_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAMIFY_API_KEY", "s3cret")
    assert "s3cret" not in printed(capsys)
    assert 'api_key = "s3cret"  # RAMIFY_API_KEY' in printed(capsys, "--show-secrets")


def test_a_key_may_be_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    config = ServerConfig(api_key_file=str(file))
    assert config.api_key == "s3cret"
    assert dataclasses.replace(config, port=1).api_key == "s3cret"
    assert "s3cret" not in printed(capsys, "--api-key-file", str(file), "--host", "0.0.0.0")
    assert "give one" in refused(capsys, "serve", "--api-key-file", str(file), "--api-key", "x")
    file.write_text("\n")
    assert "is empty" in refused(capsys, "serve", "--api-key-file", str(file))
    assert "cannot be read" in refused(capsys, "serve", "--api-key-file", str(tmp_path / "no"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("page-sise = 3", "line 1: there is no option page_sise. Did you mean page_size?"),
        ("max_model_len = 3", "line 1: there is no option max_model_len. Here it is context_length."),
        ("\n\npage_size = 'x'", "line 3: page_size is 'x'; it must be a whole number."),
        ("page_size = 1.5", "page_size is 1.5; it must be a whole number."),
        ("overlap = 1", "overlap is 1; it must be true or false."),
        ("api_key = true", "api_key is …; it must be a text."),
        ("kv_memory_gb = '1'", "kv_memory_gb is '1'; it must be a number."),
        ("loras = 'a'", "loras is 'a'; it must be a table of name = path."),
        ("served-model-name = [1]", "served_model_name is [1]; it must be a list of texts."),
        ("\nport = 99999", "port is 99999; it must be between 0 and 65535. (port is from "),
        ("policy = 'lpm'", "Here it is prefix. (policy is from "),
        ("page-size = 1\npage_size = 2", "page_size is given twice: in "),
        ("page_size = ", "is no TOML file: "),
        ("cpus_per_replica = 2", "line 1: cpus_per_replica is no option of `ramify serve`."),
    ],
)
def test_what_is_wrong_in_a_file_is_refused_with_its_place(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ramify.toml"
    file.write_text(text)
    message = refused(capsys, "serve", "--config", str(file))
    assert said in message
    assert str(file) in message


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "no.toml")
    assert refused(capsys, "serve", "--config", path) == (
        f"ramify: {path} cannot be read: No such file or directory.\n"
    )


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("PAGE_SISE", "3", "RAMIFY_PAGE_SISE: there is no option page_sise. Did you mean page_size?"),
        ("PAGE_SIZE", "x", "RAMIFY_PAGE_SIZE: page_size is 'x'; it must be a whole number."),
        ("OVERLAP", "maybe", "RAMIFY_OVERLAP: overlap is 'maybe'; it must be true or false."),
        ("LORAS", "a", "RAMIFY_LORAS: loras is 'a'; it must be name=path, with commas between several."),
        ("ROPE_SCALING", "{1", "RAMIFY_ROPE_SCALING: rope_scaling is '{1'; it must be JSON of an object."),
        ("PORT", "99999", "port is 99999; it must be between 0 and 65535. (port is from RAMIFY_PORT.)"),
        ("API_KEY", "", "api_key is empty. (api_key is from RAMIFY_API_KEY.)"),
    ],
)
def test_what_is_wrong_in_the_environment_is_refused(
    variable: str,
    text: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(PREFIX + variable, text)
    assert refused(capsys, "serve") == f"ramify: {said}\n"


def test_variables_that_kubernetes_sets_for_a_service_are_no_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "PORT": "tcp://10.0.0.1:80",
        "PORT_80_TCP": "tcp://10.0.0.1:80",
        "PORT_80_TCP_ADDR": "10.0.0.1",
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "80",
        "SERVICE_PORT_HTTP": "80",
        "CACHE_SERVICE_HOST": "10.0.0.2",
    }.items():
        monkeypatch.setenv(PREFIX + name, text)
    assert "port = 30000  # default" in printed(capsys)


def test_no_option_has_the_name_of_another_variable() -> None:
    names = {PREFIX + field.name.upper() for field in dataclasses.fields(ServerConfig)}
    assert not names & OTHER_VARIABLES.keys()


def test_other_commands_take_the_engines_part_of_a_servers_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ramify.toml"
    file.write_text("model = 'no.gguf'\npage_size = 8\nport = 3\n")
    out = printed(capsys, "--config", str(file), command="chat")
    assert f"page_size = 8  # {file}, line 2" in out
    assert "port" not in tomllib.loads(out)
    monkeypatch.setenv("RAMIFY_CONFIG", str(file))
    for command in ("inspect", "pull"):
        main.main([command])
        assert "no.gguf" in capsys.readouterr().err
    # An engine's options that no flag gives do not speak against a server's address.
    assert "--seed describes an engine" in refused(
        capsys, "chat", "--endpoint", "http://[::1]:1", "--seed", "1"
    )
    assert "cannot be reached" in refused(capsys, "chat", "--endpoint", "http://[::1]:1")
