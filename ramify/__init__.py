"""Ramify: programs that make many calls to a language model, and the runtime that runs them.

Everything below can be used as ``import ramify as sgl``: names follow SGLang's frontend. `__init__.pyi` lists
the public names. A name is imported at its first use. So the runtime's processes, which use none of these
names, start without importing the DSL.

The modules beside this file and `html`, `tool_calls` and `decisions` are shared by `lang` and `runtime`:
    messages, engine_messages   between clients and the runtime, and between the engine core's processes
    constraint, sampling_params, bounds, priority, fill    the parts of a request
    graph, graph_text           a program as a graph, and the texts that it inserts
    questions, model_info       decisions about a prompt, and the served model
    sampling_options            sampling options under the names that SGLang and others use
    json_text, schema_bundle    JSON from outside, and schemas that other schemas refer to
    errors, spelling, text      errors, similar names, and texts shortened for people
    option_values               texts and values of files as the values of options
    credentials                 addresses and command lines without the credentials in them
    cache, machine_code, answers    on disk: models and grammars, compiled code, answers of models
    logs, spans                 lines of the log, and spans of OpenTelemetry
    loop, retry, unreachable    one event loop for blocking functions; requests sent again; failed connections
These packages lie above `lang` and `runtime`, which never import them: `programs` (``POST /v1/programs``),
`batches` (``/v1/batches``), `bench`, `ray`, `cli`, and `__main__` (``python -m ramify``).

Layers, lowest first: own modules; html; tool_calls; decisions; programs; batches; bench; ray; cli.inputs;
cli.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

if not (Path(__file__).parent / "lang").is_dir():
    # A script in a clone imports this folder, also where a copy is installed. Then nothing else
    # maps `lang` and the other folders beside this one.
    __path__.append(str(Path(__file__).parent.parent))


def _read_stub() -> dict[str, str]:
    """Public name → the module that defines it, read from the imports in `__init__.pyi`."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


_MODULES = _read_stub()


def __getattr__(name: str) -> Any:
    if _MODULES.get(name) == __name__:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name in _MODULES:
        module = importlib.import_module(_MODULES[name])
        value = getattr(module, name, None) or importlib.import_module(f"{module.__name__}.{name}")
    elif name == "__version__":
        from importlib.metadata import version

        value = version("ramify-llm")  # the name of the distribution; the package is `ramify`
    elif name.startswith("_") or (value := _unsupported(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _unsupported(name: str) -> Any:
    from ramify.lang.common.unsupported import UNSUPPORTED, unsupported

    return unsupported(name, UNSUPPORTED[name]) if name in UNSUPPORTED else None


def __dir__() -> list[str]:
    return __all__


__all__ = sorted([*_MODULES, "__version__"])
