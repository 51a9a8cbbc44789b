"""The functions that programs are written with. Names and meaning follow SGLang's frontend."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Concatenate, Literal, Never, ParamSpec, Protocol, TypeVar, Unpack, overload

from msgspec import structs
from typing_extensions import TypeForm

import ramify.graph as graph
from ramify.bounds import Bounds
from ramify.constraint import Constraint, Strict, Whitespace, ebnf, json_schema, structural_tag
from ramify.constraint import grammar as grammar_constraint
from ramify.constraint import regex as regex_constraint
from ramify.errors import InvalidConstraint, InvalidRequest, UnsupportedField, UnsupportedNode
from ramify.lang.backends.base import Backend
from ramify.lang.calls.choices import DEFAULT_METHOD, METHODS, ChoicesSamplingMethod, token_length_normalized
from ramify.lang.calls.limits import Limit, limiting
from ramify.lang.common.caller import caller_line
from ramify.lang.functions.async_function import AsyncFunction
from ramify.lang.functions.function import Function
from ramify.lang.program.nodes import (
    Decide,
    DescribeTools,
    Gen,
    ModelStep,
    Node,
    RoleBegin,
    RoleEnd,
    Row,
    Select,
    Step,
    as_node,
)
from ramify.lang.program.run import call_backend
from ramify.lang.prompt.thinking import read_thinking
from ramify.lang.state.state import ProgramState
from ramify.lang.tools.tool import Tool, as_tools, make_tool
from ramify.lang.typed.schema import Schema, dtype_schema, schema_of, with_json_options
from ramify.messages import Thinking
from ramify.sampling_options import SamplingKeywords, check_names, read_options
from ramify.schema_bundle import Definitions
from ramify.spelling import nearest, parameters_of, suggests

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Decorator(Protocol):
    """The result of ``function()``. Its overloads are those of `function`."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, body: Callable[Concatenate[ProgramState, P], Never], /
    ) -> Function[P, Any]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, body: Callable[Concatenate[ProgramState, P], Coroutine[Any, Any, R]], /
    ) -> AsyncFunction[P, R]: ...
    @overload
    def __call__(self, body: Callable[Concatenate[ProgramState, P], R], /) -> Function[P, R]: ...


@overload
def function(  # type: ignore[overload-overlap]  # a body that returns Any: pyright takes the first that fits
    body: Callable[Concatenate[ProgramState, P], Never], /
) -> Function[P, Any]: ...
@overload
def function(  # type: ignore[overload-overlap]  # a coroutine function is a function as well
    body: Callable[Concatenate[ProgramState, P], Coroutine[Any, Any, R]], /
) -> AsyncFunction[P, R]: ...
@overload
def function(body: Callable[Concatenate[ProgramState, P], R], /) -> Function[P, R]: ...
@overload
def function(body: None = None, /) -> Decorator: ...
def function(body: Callable[..., Any] | None = None, /) -> Any:
    """Turn a function, plain or ``async``, into a program. The function's first parameter is the program
    state."""
    if body is None:
        return function
    return AsyncFunction(body) if inspect.iscoroutinefunction(body) else Function(body)


class GenKeywords(SamplingKeywords, total=False):
    """Arguments of `gen` on which the type of the value does not depend."""

    whitespace: Whitespace | None
    any_order: bool | None
    strict: Strict | None
    definitions: Definitions | None
    retries: int
    keep_failed: bool
    timeout: float | None
    backend: Backend | str | None
    model: str | None
    priority: int | None
    lora: str | None
    thinking: bool | Mapping[str, Any] | None


class TextKeywords(GenKeywords, total=False):
    """Arguments of `gen` without a schema, the value of which is text."""

    dtype: type | str | None
    regex: str | None
    json_schema: str | Mapping[str, Any] | None
    ebnf: str | None
    structural_tag: str | Mapping[str, Any] | None
    grammar: Constraint | str | None
    choices: Sequence[str] | None
    choices_method: ChoicesSamplingMethod | None


@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    schema: str | Mapping[str, Any],
    n: int | None = None,
    validate: Callable[[Any], object] | None = None,
    **options: Unpack[GenKeywords],
) -> ModelStep[Any]: ...
@overload
def gen(  # type: ignore[overload-overlap]  # an int may be 1
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    schema: TypeForm[T],
    n: Literal[1] | None = None,
    validate: Callable[[T], object] | None = None,
    **options: Unpack[GenKeywords],
) -> ModelStep[T]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    schema: TypeForm[T],
    n: int,
    validate: Callable[[T], object] | None = None,
    **options: Unpack[GenKeywords],
) -> ModelStep[list[T]]: ...
@overload
def gen(  # type: ignore[overload-overlap]  # an int may be 1
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    schema: None = None,
    n: Literal[1] | None = None,
    validate: Callable[[str], object] | None = None,
    **options: Unpack[TextKeywords],
) -> ModelStep[str]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    schema: None = None,
    n: int,
    validate: Callable[[str], object] | None = None,
    **options: Unpack[TextKeywords],
) -> ModelStep[list[str]]: ...
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    schema: Any = None,
    dtype: type | str | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    whitespace: Whitespace | None = None,
    any_order: bool | None = None,
    strict: Strict | None = None,
    definitions: Definitions | None = None,
    ebnf: str | None = None,
    structural_tag: str | Mapping[str, Any] | None = None,
    grammar: Constraint | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    validate: Callable[[Any], object] | None = None,
    retries: int = 0,
    keep_failed: bool = False,
    timeout: float | None = None,
    backend: Backend | str | None = None,
    model: str | None = None,
    priority: int | None = None,
    lora: str | None = None,
    thinking: bool | Mapping[str, Any] | None = None,
    **options: Any,
) -> ModelStep:
    """Generate text, append it, and set the variable `name` to it.

    Args:
        max_tokens: Most tokens; by default the max_tokens of `run`, else 128, or fewer if the engine allows
            fewer.
        schema: The type of the value: a pydantic model, dataclass, TypedDict, Literal, Enum, int, float,
            bool, str, list[T], Optional[T], ...; or a JSON schema as a mapping or as JSON text. The variable
            holds the parsed value.
        dtype: int, float, bool or str as in SGLang: the output is constrained and stays text.
        regex: A regular expression that the whole output matches, from its first to its last character. The
            variable holds text. (A ``pattern`` in a schema is not anchored: the string contains a match.)
        json_schema, ebnf, structural_tag: Constraints; the variable holds text.
        whitespace: The white space of JSON output: "natural" (the default), "compact", or the largest number
            of white space characters between two tokens of JSON.
        any_order: True lets the properties that a schema names come in any order.
        strict: True (the default) refuses a schema with a keyword that the grammar cannot enforce. False
            ignores such keywords. "validate" ignores such keywords during generation, and validates the
            complete output; an invalid output is treated as output that does not parse.
        definitions: The external schemas that ``$ref``s of `schema` or `json_schema` point to: a mapping from
            URI to schema, or the path of a folder of schemas. Nothing is downloaded.
        grammar: A ready grammar (`grammars`) or another constraint of `ramify.constraint`; or the text of a
            grammar, which is read as GBNF if it contains ``::=``, else as Lark. The variable holds text.
        choices, choices_method: As for `select`; with `choices` this function is `select`.
        validate: Called with the value. It rejects the value by raising ValueError (as pydantic's errors are)
            or AssertionError. A rejected value fails the step unless `retries` are left.
        retries: The largest number of further attempts after an output that does not parse or that `validate`
            rejects. The model is shown the failed output and its error, and generates again. The program
            continues with the valid output alone. No output is streamed before it is known to be valid.
        keep_failed: Keep the failed attempts and the messages about their errors in the prompt.
        timeout: Seconds for the whole step, retries included. After this time the request is aborted, and the
            step fails with `RequestTimeout` as the cause.
        backend: The backend of this step, or the name of a backend in the `Router` that the program runs on.
            The prompt so far is written anew with the chat template and tokenizer of that backend's model.
        model: The name of the model of this step, on a backend with several models
            (``rm.Engine(models={…})``, a server of several models). The prompt is written anew as for
            `backend`.
        priority: The priority of this step's requests, between -100 and 100: higher goes first. The default
            is the priority given to `run`, else that of the backend, else 0 (-1 in a batch).
        lora: The name of the LoRA adapter of this step, which must be loaded on the backend; "" for the base
            model. The default is the adapter given to `run`, else that of the backend. The adapter applies to
            the prompt as well.
        thinking: True, or a mapping such as ``{"max_tokens": 256}``: the model thinks before it answers.
            After max_tokens tokens of thoughts (1024 by default) the answer is forced to begin. The variable
            holds the answer without the thoughts, which `ProgramState.thinking` returns. `max_tokens`, `stop`
            and the constraint apply to the answer only. False: the model does not think. None: the default of
            the chat template. Remote OpenAI models may take ``{"effort": "low"}``.
        options: Fields of `ramify.sampling_params.SamplingParams`, or SGLang's spellings of them:
            max_new_tokens, min_new_tokens, sampling_seed, return_logprob, top_logprobs_num,
            logprob_start_len. With n > 1 the variable holds a list, whose first output is appended.

    The step can be given in place of the variable's name: ``s[gen_step]``. Type checkers know the type of the
    value from `schema` and `n`.

    Raises `UnsupportedField` for an unknown option, `InvalidRequest` for a wrong value, and
    `InvalidConstraint` for an invalid constraint.
    """
    line = caller_line()
    check_names(options, of="gen", beside=GEN_ARGUMENTS)
    given = {
        "schema": schema,
        "dtype": dtype,
        "regex": regex,
        "json_schema": json_schema,
        "ebnf": ebnf,
        "structural_tag": structural_tag,
        "grammar": grammar,
        "choices": choices,
    }
    constraints = _at_most_one(given)
    of_json = {
        "whitespace": whitespace,
        "any_order": any_order,
        "strict": strict,
        "definitions": definitions,
    }
    if not isinstance(retries, int) or retries < 0:
        raise InvalidRequest(f"retries is {retries!r}; it must be an integer of 0 or more.", field="retries")
    if keep_failed and not retries:
        raise InvalidRequest("keep_failed needs retries.", field="keep_failed")
    options = {"max_tokens": max_tokens, **options} if max_tokens is not None else options
    request: dict[str, Any] = {"name": name, "timeout": timeout, "priority": priority}
    request |= {"lora": lora, "model": model}
    if choices is not None:
        options |= {"validate": validate, "retries": retries or None, "thinking": thinking, **of_json}
        return _scored(choices, options, choices_method, request, backend, line)
    if choices_method is not None:
        raise InvalidRequest("choices_method needs choices.", field="choices_method")
    wanted = with_json_options(_schema(constraints), of_json)
    node = graph.Gen(
        options=read_options(options, of="gen"),
        constraint=wanted.constraint,
        stop=wanted.stop,
        thinking=read_thinking(thinking),
        **request,
    )
    return Gen(
        node.checked(), wanted.parse, schema, validate, retries, keep_failed, backend=backend, line=line
    )


GEN_ARGUMENTS = parameters_of(gen)


def _at_most_one(constraints: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in constraints.items() if value is not None}
    if len(found) > 1:
        raise InvalidConstraint(
            f"One of {' and '.join(found)} can be given, not both.", field=list(found)[-1]
        )
    return found


def _scored(
    choices: Sequence[str],
    options: dict[str, Any],
    method: ChoicesSamplingMethod | None,
    request: Mapping[str, Any],
    backend: Backend | str | None,
    line: str | None,
) -> Select:
    given = read_options({"temperature": options.pop("temperature", None)}, of="gen")
    temperature = given.get("temperature", 0.0)
    for extra, value in options.items():
        if value is not None:
            raise UnsupportedField(f"A gen with choices scores them, so {extra} has no effect.", field=extra)
    return _select(choices, temperature, method, request, backend, line)


def gen_int(
    name: str | None = None, max_tokens: int | None = None, **options: Unpack[GenKeywords]
) -> ModelStep[str]:
    """Generate an integer; the variable holds its text, as in SGLang. ``schema=int`` gives an int."""
    return gen(name, max_tokens, dtype=int, **options)


def gen_string(
    name: str | None = None, max_tokens: int | None = None, **options: Unpack[GenKeywords]
) -> ModelStep[str]:
    """Generate a quoted string; the variable holds the string with its quotes, as in SGLang."""
    return gen(name, max_tokens, dtype=str, **options)


@suggests
def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod = token_length_normalized,
    *,
    timeout: float | None = None,
    backend: Backend | str | None = None,
    model: str | None = None,
    priority: int | None = None,
    lora: str | None = None,
) -> ModelStep[str]:
    """Append the choice with the best score. `choices_method` computes the scores from the log-probabilities
    of the tokens of each choice.

    After `timeout` seconds the step fails with `RequestTimeout` as the cause. `backend`, `model`,
    `priority` and `lora` are the same as in `gen`.
    """
    if choices is None:
        raise InvalidRequest("select needs choices.", field="choices")
    request = {"name": name, "timeout": timeout, "priority": priority, "lora": lora, "model": model}
    return _select(choices, temperature, choices_method, request, backend, caller_line())


def _select(
    choices: Sequence[str],
    temperature: float,
    method: ChoicesSamplingMethod | None,
    request: Mapping[str, Any],
    backend: Backend | str | None,
    line: str | None,
) -> Select:
    if isinstance(choices, str) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise InvalidRequest("choices must be a list of non-empty strings.", field="choices")
    if temperature > 1e-5:
        raise UnsupportedField("Choices are scored at temperature 0.", field="temperature")
    method = method or token_length_normalized
    known = next((name for name in METHODS if METHODS[name] is method), None)
    node = graph.Select(choices=tuple(choices), method=known or DEFAULT_METHOD, **request)
    return Select(node.checked(), None if known else method, backend=backend, line=line)


def _schema(given: Mapping[str, Any]) -> Schema:
    for kind, value in given.items():
        return CONSTRAINTS[kind](value)
    return Schema(None, str)


def _as_text(build: Callable[[Any], Constraint]) -> Callable[[Any], Schema]:
    return lambda value: Schema(build(value), str)


CONSTRAINTS: dict[str, Callable[[Any], Schema]] = {
    "schema": schema_of,
    "dtype": dtype_schema,
    "regex": _as_text(regex_constraint),
    "json_schema": _as_text(json_schema),
    "ebnf": _as_text(ebnf),
    "structural_tag": _as_text(structural_tag),
    "grammar": _as_text(grammar_constraint),
}


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    function: None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    strict: bool = True,
    timeout: float | None = None,
    concurrency: int | None = None,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Turn a function, plain or ``async``, into a tool that a model may call; see `ProgramState.call_tools`.

    Every parameter must have a type annotation, from which pydantic makes the parameter's JSON schema. The
    model is shown the function's docstring, and the descriptions of the parameters, which are read from
    ``Args:`` or from ``:param name:`` lines.

    Args:
        name: The name that the model is shown; by default the function's.
        description: Replaces the docstring.
        strict: True (the default) refuses a schema with a keyword that the grammar cannot enforce. With False
            such a keyword is not enforced, and is listed in ``unenforced`` of the turn's `get_meta_info`. The
            arguments are validated in either case.
        timeout: Seconds after which a call fails.
        concurrency: The largest number of calls of the tool that run at once, over all branches, rows and
            programs of this process. The time that a call waits to start does not count towards `timeout`.
    """
    if function is None:
        return lambda function: make_tool(function, **options)
    return make_tool(function, **options)


def system(content: str | Node | None = None, *, tools: Sequence[object] | None = None) -> Node:
    """A system turn. If `tools` are given, their descriptions are appended to `content`."""
    return _turn("system", content, tools)


def user(content: str | Node | None = None, *, tools: Sequence[object] | None = None) -> Node:
    """A user turn. `tools` are described as in `system`; describe them here for models whose chat template
    has no system turn or does not support tools."""
    return _turn("user", content, tools)


def assistant(content: str | Node | None = None) -> Node:
    """An assistant turn; `content` is usually a `gen`."""
    return _turn("assistant", content)


def _turn(role: str, content: str | Node | None, tools: Sequence[object] | None = None) -> Node:
    inside = () if content is None else as_node(content).steps()
    described = () if tools is None else (DescribeTools(as_tools(tools)),)
    return Row((RoleBegin(role, caller_line(), tools is not None), *inside, *described, RoleEnd(role)))


def system_begin() -> Node:
    return RoleBegin("system", caller_line())


def system_end() -> Node:
    return RoleEnd("system")


def user_begin() -> Node:
    return RoleBegin("user", caller_line())


def user_end() -> Node:
    return RoleEnd("user")


def assistant_begin() -> Node:
    return RoleBegin("assistant", caller_line())


def assistant_end() -> Node:
    return RoleEnd("assistant")


@suggests
def limit(
    *, timeout: float | None = None, max_total_tokens: int | None = None, max_calls: int | None = None
) -> AbstractContextManager[Limit]:
    """A block that limits the time, tokens and calls of the steps appended in it: ``with limit(…):``, in
    async code too.

    The limit also holds for branches that are forked in the block, and for runs that begin in it. Blocks may
    be nested: all their limits hold. A step that would exceed a limit fails, with `BudgetExceeded` as the
    cause, and the limit's requests in flight are stopped. The program can continue after
    `ProgramState.recover`. The block's variable has the amounts spent so far: `seconds`, `tokens` and
    `calls`.

    Args:
        timeout: Seconds of wall clock from the beginning of the block.
        max_total_tokens: Prompt and completion tokens of all requests, as `Usage` counts them, including the
            tokens of failed steps.
        max_calls: Requests to the model. A `select` counts as one request, decisions in a row together, and
            each sample and each retry of a `gen`.
    """
    bounds = Bounds(timeout, max_total_tokens, max_calls)
    if not bounds:
        raise InvalidRequest("limit needs timeout, max_total_tokens or max_calls.", field="max_total_tokens")
    return limiting(bounds, f"the limit at {caller_line()}")


MODEL_TYPES = (
    *("apriel", "deepseek-r1", "deepseek-v3", "glm45", "gpt-oss", "interns1", "kimi", "kimi_k2", "minimax"),
    *("minimax-append-think", "nano_v3", "nemotron_3", "qwen3", "qwen3-thinking", "step3"),
)
"""SGLang's names of reasoning parsers."""


def separate_reasoning(expr: str | Node | None = None, model_type: str | None = None) -> Node:
    """Make each `gen` in `expr` think, as SGLang's function of this name does. For a `gen` named ``NAME``,
    the variable ``NAME_reasoning_content`` holds the thoughts. The variable ``NAME`` and the streamed text
    hold the answer without the thoughts.

    `model_type` must be one of SGLang's names of reasoning parsers, but has no effect: the marks of thoughts
    always come from the model's chat template. If a `gen` sets max_tokens, its thoughts may take up to that
    many tokens in addition.
    """
    if model_type not in MODEL_TYPES:
        raise UnsupportedField(
            f"There is no model_type {model_type!r}.",
            field="model_type",
            remedy=nearest(str(model_type), MODEL_TYPES) or f"Take one of {', '.join(MODEL_TYPES)}.",
        )
    return Row(tuple(map(_separated, as_node(expr).steps())))


def _separated(step: Step) -> Step:
    if isinstance(step, Select | Decide):
        kind = type(step).__name__.lower()
        raise UnsupportedNode(
            f"A {kind} generates nothing, so it does not think.", field="separate_reasoning"
        )
    if not isinstance(step, Gen):
        return step
    if step.variable is None:
        raise InvalidRequest("separate_reasoning needs the gen to have a name.", field="name")
    thinking = step.node.thinking or Thinking(max_tokens=step.node.options.get("max_tokens"))
    return replace(step, node=structs.replace(step.node, thinking=thinking), separate=True)


def flush_cache(backend: Backend | None = None) -> Any:
    """Drop every unused cached prefix of `backend`, or of the default backend."""
    return call_backend(backend, "flush_cache")


def get_server_info(backend: Backend | None = None) -> Any:
    """The configuration and state of `backend`, or of the default backend."""
    return call_backend(backend, "get_server_info")
