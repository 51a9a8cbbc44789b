"""A Python file of programs, and arguments from the command line for one of them."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from ramify.cli.inputs.row_files import json_or_text
from ramify.cli.inputs.run_rows import keywords, required
from ramify.errors import InvalidRequest, NotFound
from ramify.lang.common.caller import users_frames
from ramify.spelling import nearest


def load(place: str) -> Any:
    """The program that ``path/to/file.py:name`` names. The name may be left out if the file has one program.

    Programs that the file imports count only if it has none of its own, and a program with two names counts
    once. Raises `NotFound`, with a list of the file's programs, if it names none or could mean several.
    """
    from ramify.lang.functions.program import Program

    path, separator, name = place.rpartition(":")
    if not separator and place.endswith(".py"):
        path = place
    elif not (path and name):
        raise InvalidRequest(f"{place!r} is not file.py:function.", field="program")
    module = load_module(path)
    programs = {key: value for key, value in vars(module).items() if isinstance(value, Program)}
    if name in programs:
        return programs[name]
    own = {key: value for key, value in programs.items() if value.body.__module__ == module.__name__}
    distinct = {value: key for key, value in reversed((own or programs).items())}
    programs = {key: value for value, key in reversed(distinct.items())}
    if path == place and len(programs) == 1:
        return next(iter(programs.values()))
    if not programs or callable(getattr(module, name, None)):
        raise NotFound(
            f"{path} has no program{f' {name!r}' if path != place else ''}.",
            field="program",
            remedy="Write @ramify.function above a function whose first parameter is the state, as s.",
        )
    several = f"{path} has {len(programs)} programs"
    error = NotFound(
        f"{several}." if path == place else f"{path} has no program {name!r}.",
        field="program",
        remedy="Name one:" if path == place else f"{nearest(name, programs) or ''} There are:".lstrip(),
    )
    for key, program in programs.items():
        error.add_note(f"  {path}:{key} {' '.join(f'{one}=…' for one in keywords(program))}".rstrip())
    raise error


def load_module(path: str) -> ModuleType:
    """The module in the Python file at `path`.

    If the file raises, an `InvalidRequest` names the line, and its note is the traceback without Ramify's
    frames.
    """
    file = Path(path)
    if not file.is_file():
        raise NotFound(f"There is no file {path}.", field="program")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise InvalidRequest(f"{path} is not a Python file.", field="program")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pydantic look their module up
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _raised(path, error) from None
    return module


def _raised(path: str, error: Exception) -> InvalidRequest:
    line, frames = users_frames(error)
    if isinstance(error, SyntaxError):
        line = f"{error.filename}:{error.lineno}"
    last = traceback.format_exception_only(error)
    said = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}".rstrip(": .")
    failure = InvalidRequest(
        f"{path} cannot be imported. {said}{'' if line is None else f', at {line}'}.", field="program"
    )
    failure.add_note("".join([*traceback.format_list(frames), *last]).rstrip("\n"))
    return failure


def read_arguments(program: Any, pairs: list[str], *, complete: bool = True) -> dict[str, Any]:
    """Parse ``key=value`` pairs to keyword arguments of `program`.

    With `complete`, all required arguments must be given.
    """
    parameters = inspect.signature(program.body, eval_str=True).parameters
    own = inspect.Signature([one for name, one in parameters.items() if name in program.arg_names])
    form = f"It is {program.__name__}{own}."
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise InvalidRequest(f"{pair!r} is not key=value.", field="arguments", remedy=form)
        if key not in keywords(program):
            near = nearest(key, keywords(program))
            raise InvalidRequest(
                f"The program has no parameter {key!r}.",
                field="arguments",
                remedy=f"{near} {form}" if near else form,
            )
        arguments[key] = json_or_text(value, parameters[key])
    needed = [name for name in required(program) if name not in arguments]
    if needed and complete:
        missing = ", ".join(f"{name}=…" for name in needed)
        raise InvalidRequest(f"The program needs {missing}.", field="arguments", remedy=form)
    return arguments
