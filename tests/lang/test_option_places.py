"""An option is stated in the signature of its function, in the node and in the message, and nowhere else."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import get_overloads, get_type_hints

import pytest

import ramify as rm
from ramify import graph, messages, sampling_params
from ramify.lang import api, decide
from ramify.lang.calls.limits import NAMES as BOUNDS
from ramify.lang.functions import arguments
from ramify.lang.functions.async_function import AsyncFunction
from ramify.lang.functions.function import Function
from ramify.lang.functions.program import RESERVED
from ramify.lang.graph import execute, recorder
from ramify.lang.program import nodes
from ramify.lang.state import state
from ramify.sampling_options import NAMES, OF_REQUESTS, SPELLINGS, SamplingKeywords
from ramify.spelling import parameters_of

MODULES = (api, state, recorder, execute, nodes, graph, messages, sampling_params)


def places_of(option: str) -> list[str]:
    """The functions and classes of the modules that have a parameter or a field of this name."""
    found: list[str] = []
    for module in MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.ClassDef):
                fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                stated = any(isinstance(one.target, ast.Name) and one.target.id == option for one in fields)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                stated = option in [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
            else:
                continue
            if stated:
                found.append(f"{module.__name__}.{node.name}")
    return found


GEN, NODE, MESSAGE = "ramify.lang.api.gen", "ramify.graph.Gen", "ramify.messages.Generate"
KEYWORDS = "ramify.lang.api.GenKeywords"  # for type checkers
ANY_REQUEST = "ramify.graph.Request"
OTHERS = {
    "ramify.lang.api.select",
    "ramify.lang.api.tool",
    "ramify.lang.api.limit",
    "ramify.lang.state.state.call_tools",
    "ramify.lang.state.state.text_iter",
    "ramify.lang.state.state.text_async_iter",
    "ramify.lang.program.nodes.ResultRef",
    "ramify.graph.Result",
    "ramify.model_info.ChatFormat",
}
"""Places of other functions and nodes that have something of the same name."""


@pytest.mark.parametrize(
    ("option", "places"),
    [
        ("timeout", {GEN, KEYWORDS, ANY_REQUEST}),
        ("priority", {GEN, KEYWORDS, ANY_REQUEST, MESSAGE}),
        ("lora", {GEN, KEYWORDS, ANY_REQUEST, MESSAGE}),
        ("thinking", {GEN, KEYWORDS, NODE, MESSAGE}),
        ("constraint", {NODE, MESSAGE}),
    ],
)
def test_an_option_of_gen_is_stated_in_its_signature_its_node_and_its_message(option, places):
    assert set(places_of(option)) - OTHERS == places


def test_a_sampling_option_is_stated_once():
    fields = set(sampling_params.SamplingParams.__struct_fields__)
    assert fields & set(parameters_of(rm.gen)) == {"max_tokens"}  # positional, as in SGLang
    for option in fields - {
        "max_tokens",
        "temperature",
        "logprobs",
        "stop",
        "n",
    }:  # others have these
        assert places_of(option) == ["ramify.sampling_params.SamplingParams"]


def keywords(*kinds):
    return {name for kind in kinds for name in get_type_hints(kind)}


def test_type_checkers_know_every_sampling_option():
    assert keywords(SamplingKeywords) == NAMES - {"max_tokens", "n", *OF_REQUESTS}
    fields = get_type_hints(sampling_params.SamplingParams)
    written = {
        "stop": str | Sequence[str],
        "stop_token_ids": Sequence[int],
        "logit_bias": Mapping[int, float],
    }
    for name, kind in get_type_hints(SamplingKeywords).items():
        field = SPELLINGS.get(name, name)
        if field in fields:
            assert kind == written.get(field, fields[field]) | None


def test_type_checkers_know_every_argument():
    assert keywords(api.TextKeywords) | {"name", "max_tokens", "n", "schema", "validate"} == {
        *parameters_of(api.gen),
        *keywords(SamplingKeywords, api.GenKeywords),
        "n",
    }
    assert keywords(arguments.RunKeywords) == {*NAMES, *RESERVED, *BOUNDS}
    assert keywords(arguments.RowKeywords) == keywords(arguments.RunKeywords) - {"stream"}
    of_batches = keywords(arguments.FileKeywords) - keywords(arguments.RowKeywords)
    assert of_batches | {"rows", "out", "dry_run"} == {*parameters_of(AsyncFunction.run_batch)}
    assert of_batches | {"rows", "out", "dry_run", "generator_style"} == {*parameters_of(Function.run_batch)}
    assert keywords(decide.StepKeywords) | {"name", "kind", "instructions", "choices"} == {
        *parameters_of(decide.decide)
    }
    assert keywords(decide.DecideKeywords) | {"state", "questions"} == {*parameters_of(decide.adecide)}


@pytest.mark.parametrize("overload", [1, 2])
def test_run_states_every_option_for_type_checkers(overload):
    """Beside ``**kwargs: P.kwargs`` the options cannot be written as an unpacked TypedDict."""
    hints = get_type_hints(get_overloads(arguments.Runs.run)[overload])
    for name in ("self", "first", "options_by_name", "args", "kwargs", "return"):
        hints.pop(name, None)
    assert hints == get_type_hints(arguments.RunKeywords)


NEW_OPTION = """
import importlib.util, pathlib, sys
import ramify
path = pathlib.Path(importlib.util.find_spec("ramify.sampling_params").origin)
source = path.read_text()
field = "    min_p: float = 0.0\\n"
assert source.count(field) == 1
spec = importlib.util.spec_from_file_location("ramify.sampling_params", path)
module = importlib.util.module_from_spec(spec)
sys.modules["ramify.sampling_params"] = module
exec(compile(source.replace(field, field + "    warmth: float = 0.0\\n"), str(path), "exec"), module.__dict__)

import msgspec
import ramify as rm
from ramify.graph import Graph
from ramify.messages import Generate

@rm.function
def program(s):
    s += "a" + rm.gen("x", warmth=0.5) + rm.gen("y")

for run in (program, program.compile()):
    backend = rm.ScriptedBackend({"x": "b", "y": "c"})
    run.run(backend=backend, warmth=0.25)
    assert [request.sampling.warmth for request in backend.requests] == [0.5, 0.25]
sent = msgspec.msgpack.decode(msgspec.msgpack.encode(backend.requests[0]), type=Generate)
assert sent.sampling.warmth == 0.5
wire = msgspec.json.decode(msgspec.json.encode(program.compile().graph().graph), type=Graph).check()
assert wire.nodes[1].options == {"warmth": 0.5}
try:
    rm.gen("x", warmth="hot")
except rm.InvalidRequest as error:
    assert error.field == "warmth"
else:
    raise AssertionError
"""


def test_a_new_sampling_option_goes_from_gen_to_the_message():
    """With one field added to a copy of `SamplingParams`, programs, graphs and messages carry it."""
    subprocess.run([sys.executable, "-c", NEW_OPTION], check=True, timeout=60)
