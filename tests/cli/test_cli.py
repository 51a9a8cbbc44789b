"""The command line itself: help, version, errors as one line, exit statuses."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import pytest
import torch

from ramify.cli import main, pull
from ramify.cli.flags import ADVANCED, GROUPS, add_config_flags, field_docs, given_fields
from ramify.ray.options import ClusterConfig
from ramify.runtime.config import SEVERAL_MODELS, EngineConfig, ServerConfig
from ramify.runtime.inspect import resolve
from ramify.runtime.model.checkpoint import ModelFiles


def test_help_lists_the_commands_and_imports_little() -> None:
    script = (
        "import sys; from ramify.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'aiohttp', 'starlette', 'zmq', 'pydantic'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert all(command in run.stdout for command in main.COMMANDS)
    assert run.stdout.endswith("[]\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith("ramify 0.")


@pytest.mark.parametrize("command", main.COMMANDS)
def test_help_of_each_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main([command, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: ramify {command}" in capsys.readouterr().out


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["pull", str(tmp_path / "nothing.gguf")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("ramify: ")
    assert "nothing.gguf" in said
    assert said.count("\n") == 1


def test_ctrl_c_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(pull, "run_command", interrupt)
    assert main.main(["pull"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    script = "import os, sys; from ramify.cli.main import main; read, write = os.pipe(); "
    script += "os.dup2(write, 1); os.close(write); os.close(read); sys.exit(main(['--version']))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (141, "")


FIELDS = {
    field.name
    for config in (ServerConfig, ClusterConfig)
    for field in dataclasses.fields(config)
    if "_" in field.name
}
"""Fields that can be no other words. Help texts name their flags."""


@pytest.mark.parametrize("command", main.COMMANDS)
def test_every_flag_has_its_sentence_in_help_and_docs(command: str) -> None:
    """A sentence, and after it the default if that is no part of the sentence."""
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    parser = main.command_parser(command)
    section = page.partition(f"\n## ramify {command}\n")[2].partition("\n## ")[0]
    for action in parser._actions[1:]:  # the first is --help
        text = parser._get_formatter()._expand_help(action)
        name = "/".join(action.option_strings) or action.dest
        assert re.fullmatch(r".+[.…](?: \(default: [^()]+\))?", text), f"{name}: {text}"
        assert "None" not in text, f"{name}: {text}"
        assert not (FIELDS - {action.dest}) & set(re.findall(r"\w+", text)), f"{name}: {text}"
        for flag in action.option_strings:
            assert f"`{flag}`" in section or f"`{flag} " in section, f"{flag} is not in docs/command-line.md"


def test_the_flags_of_the_server_have_headings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["serve", "--help"])
    out = capsys.readouterr().out
    places = [out.index(f"\n{heading}:\n") for heading in (*GROUPS, ADVANCED)]
    assert places == sorted(places)
    assert out.index("\nmemory:") < out.index("  --num-pages N") < out.index("\nlimits:")
    assert "ignored if --num-pages is given. Default, on the CPU:" in " ".join(out.split())


def test_no_command_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    out, err = capsys.readouterr()
    assert all(f"\n    {command}" in out for command in main.COMMANDS)
    assert not err


@pytest.mark.parametrize(
    ("arguments", "said"), [(["help"], "usage: ramify [-h]"), (["help", "cache"], "usage: ramify cache")]
)
def test_help_as_a_command(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main(arguments)
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("srve", "ramify: there is no command 'srve'. Did you mean serve? See ramify --help.\n"),
        ("help rn", "ramify: there is no command 'rn'. Did you mean run? See ramify --help.\n"),
        ("foo", "There are serve, deploy, run, "),
        ("serve --policy progam", "'progam' is none of program, prefix, fcfs. Did you mean program? See "),
        ("quantize a b --to int9", "'int9' is none of int8, int4, q8_0, "),
        ("calibrate x --end turns", "Did you mean turn? See ramify calibrate --help.\n"),
        ("run", "ramify run: the following arguments are required: file.py:function. See "),
    ],
)
def test_misspelt_words_are_suggested(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main(arguments.split())
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--device", "cuda"], "Say it: --capability 9.0"),
        (["--device", "cpu", "--capability", "9.0"], "capability is given"),
        (["--capability", "3.5"], "capability is 3.5; kernels are compiled ahead for 8.0 (A100), "),
        (["--page-size", "0"], "page_size is 0; it must be at least 1."),
        (["--deterministic"], "deterministic is given, which only kernels for CUDA depend on"),
    ],
)
def test_pull_compiles_for_gpus_that_it_knows(
    arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main.main(["pull", *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_pull_tells_where_the_tokenizer_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ModelFiles("tiny", tmp_path / "tiny.gguf", tmp_path / "tokenizer")
    monkeypatch.setattr(resolve, "resolve", lambda name: files)
    assert main.main(["pull", "tiny", "--tokenizer"]) == 0
    assert capsys.readouterr().out == f"{files.tokenizer}\n"


def test_wrong_flags_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main(["serve", "--port", "x"])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == (
        "ramify serve: argument --port: invalid int value: 'x'. See ramify serve --help.\n"
    )


def test_a_model_needs_no_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["serve", "no.gguf"], ["serve", "--model", "no.gguf"], ["chat", "no.gguf"]):
        arguments += ["--port", "0"] if arguments[0] == "serve" else []
        assert main.main(arguments) == 2
        assert "no.gguf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--page-size", "0"], "page_size is 0"),
        (["--log-level", "loud"], "log_level is 'loud'"),
        (["--port", "99999"], "port is 99999"),
        (["--threads", "0"], "threads is 0"),
        (["--host", "0.0.0.0"], "Give one (--api-key, --keys), or let everybody"),
        (["--host", "::"], "host is '::'"),
        (["--host", "192.168.1.5"], "host is '192.168.1.5'"),
        (["--host", "localhost.example.com"], "host is 'localhost.example.com'"),
        (["--api-key", ""], "api_key is empty"),
        (["--cors", "https://app.example.com/"], "cors names 'https://app.example.com/'"),
        (["--cors", "null"], "cors names 'null'"),
        (["--allowed-hosts", "http://x"], "allowed_hosts names 'http://x'"),
    ],
)
def test_serve_refuses_a_bad_configuration(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["serve", *arguments]) == 2
    assert problem in capsys.readouterr().err


def parse(config: type[Any], arguments: list[str]) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    add_config_flags(parser, config)
    return config(**given_fields(parser.parse_args(arguments), config))


def test_no_flags_leave_the_defaults() -> None:
    assert parse(ServerConfig, []) == ServerConfig()


def test_every_field_of_the_server_has_a_flag() -> None:
    given: dict[str, Any] = {}
    arguments = []
    hints = get_type_hints(ServerConfig)
    for field in dataclasses.fields(ServerConfig):
        flag = "--" + field.name.replace("_", "-")
        if field.name in SEVERAL_MODELS:  # they go with few of the others
            continue
        if str(field.type).split(" ")[0] == "bool":
            arguments.append(flag)
            given[field.name] = True
        elif get_origin(hints[field.name]) is Literal:
            given[field.name] = field.default
            arguments += [flag, str(field.default)]
        elif field.name == "loras":
            given["loras"] = {"a": "x=y", "b": "z"}
            arguments += ["--lora", "a=x=y", "--lora", "b=z"]
        elif field.name == "rope_scaling":
            given[field.name] = {"rope_type": "linear", "factor": 2.0}
            arguments += [flag, '{"rope_type": "linear", "factor": 2.0}']
        elif field.name == "trial":
            given[field.name] = ("skinny-products", "library-prompts")
            arguments += [flag, "skinny-products", flag, "library-prompts"]
        elif field.name == "served_model_name":
            given[field.name] = ("a", "b")
            arguments += [flag, "a", flag, "b"]
        elif field.name == "prefill_replicas":
            given[field.name] = 0  # more does not go with tensor_parallel
            arguments += [flag, "0"]
        elif field.name == "api_key_file":
            continue  # in place of api_key
        elif field.name == "log_level":
            given[field.name] = "debug"
            arguments += [flag, "debug"]
        elif field.name == "tensor_parallel":
            given[field.name] = 1  # more does not go with cold_dir
            arguments += [flag, "1"]
        elif field.name in ("kv_events", "kv_events_replay"):
            given[field.name] = "tcp://*:7"
            arguments += [flag, "tcp://*:7"]
        else:
            value = {"str": "*", "int": 7, "float": 0.5}[str(field.type).split(" ")[0]]
            given[field.name] = value
            arguments += [flag, str(value)]
    assert parse(ServerConfig, arguments) == ServerConfig(**given)


def test_flags_of_several_models() -> None:
    several = ["--models", "a", "--models", "b=c", "--models-dir", "d", "--keep-alive", "-1", "--pin", "a"]
    assert parse(ServerConfig, [*several, "--models-memory-gb", "2.5"]) == ServerConfig(
        models=("a", "b=c"), models_dir="d", keep_alive="-1", pin=("a",), models_memory_gb=2.5
    )


@dataclasses.dataclass(frozen=True)
class Base:
    mode: Literal["a", "b"] = "a"
    """Either, 50% each."""
    size: int | None = None


@dataclasses.dataclass(frozen=True)
class Derived(Base):
    on: bool = True


def test_kinds_of_fields() -> None:
    assert parse(Derived, ["--mode", "b", "--size", "3", "--no-on"]) == Derived(mode="b", size=3, on=False)
    assert dict(field_docs(Derived)) == {"mode": "Either, 50% each."}
    with pytest.raises(SystemExit):
        parse(Derived, ["--mode", "c"])


def test_engine_flags_and_endpoint_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["chat", "--endpoint", "http://127.0.0.1:1", "--page-size", "8"]) == 2
    assert "--page-size" in capsys.readouterr().err
    for flag in ("--endpoint-key", "--endpoint-model"):
        assert main.main(["chat", flag, "x"]) == 2
        assert f"{flag} needs --endpoint" in capsys.readouterr().err
    models = ["--models", "small=one.gguf", "--models", "big=two.gguf"]
    assert main.main(["chat", "--endpoint", "http://127.0.0.1:1", *models]) == 2
    assert "--models describes an engine" in capsys.readouterr().err
    assert main.main(["chat", *models]) == 2
    assert "one.gguf" in capsys.readouterr().err
    assert main.main(["chat", *models, "--models", "big=three.gguf"]) == 2
    assert "two models of the name 'big'" in capsys.readouterr().err
    assert {field.name for field in dataclasses.fields(EngineConfig)} < {
        field.name for field in dataclasses.fields(ServerConfig)
    }


def test_a_missing_package_is_named_with_the_remedy(tmp_path: Path) -> None:
    def ramify(*arguments: str) -> str:
        hide = "import sys; sys.modules['uvicorn'] = None; from ramify.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", hide, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr

    said = ramify("serve")
    assert "uvicorn" in said
    assert "pip install --editable ." in said
    (tmp_path / "program.py").write_text("import uvicorn\n")
    assert "pip install --editable ." not in ramify("run", "program.py:main")
