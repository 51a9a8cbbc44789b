"""The public names of `import ramify`, its cost, and the names of SGLang that are refused."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import ramify as rm
from ramify.lang.common.unsupported import UNSUPPORTED

SGLANG = """
Engine OpenAI RuntimeEndpoint assistant assistant_begin assistant_end flush_cache function gen gen_int
gen_string get_server_info greedy_token_selection select set_default_backend system system_begin
system_end token_length_normalized unconditional_likelihood_normalized user user_begin user_end
separate_reasoning Anthropic LiteLLM Runtime ServerArgs VertexAI image video
"""
"""The names of SGLang's frontend; those from Anthropic on are refused."""


def test_every_public_name_is_there():
    for name in set(rm.__all__) - {"Engine"}:
        assert getattr(rm, name) is not None
    assert set(dir(rm)) == set(rm.__all__)


def test_every_name_of_sglangs_frontend_is_there_or_refused_when_called():
    for name in set(SGLANG.split()) - {"Engine"}:
        if name in rm.__all__:
            continue
        with pytest.raises(rm.UnsupportedField, match=f"{name} is not there"):
            getattr(rm, name)("argument")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_refusal_says_what_to_do(name):
    with pytest.raises(rm.UnsupportedField) as unsupported:
        getattr(rm, name)()
    assert unsupported.value.field == name
    assert unsupported.value.remedy


def test_what_programs_and_states_do_not_have_yet_is_refused():
    @rm.function
    def program(s):
        """Nothing."""

    for name in ("trace", "cache"):
        with pytest.raises(rm.UnsupportedField, match=name):
            getattr(program, name)()
    for extra in ({"timeouts": 3}, {"num_workers": 3}):
        with pytest.raises(rm.UnsupportedField, match=next(iter(extra))):
            program.run_batch([], backend=rm.ScriptedBackend([]), **extra)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rm.nothing
    assert not hasattr(rm, "global_config")


def test_every_public_object_is_documented():
    for name in set(rm.__all__) - {"Engine", "__version__"}:
        found = getattr(rm, name)
        short = name.endswith(("_begin", "_end"))
        assert short or inspect.getdoc(found), name


def test_a_scripted_run_needs_no_heavy_import():
    code = (
        "import sys, ramify as rm\n"
        "@rm.function\n"
        "def f(s): s += 'Q' + rm.gen('x', schema=int)\n"
        "assert f.run(backend=rm.ScriptedBackend(['1']))['x'] == 1\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'aiohttp', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
