"""A program's body with f-strings, `join` and `str` that accept symbolic text.

An f-string of Python always makes a plain string. So a traced body is compiled again from its source, with
these expressions replaced by calls of functions of `ramify.lang.graph.symbolic`:

    f"{x} and {y!r}"   ->   joined(piece(x, "", ""), " and ", piece(y, "r", ""))

For values that are not symbolic, these functions return what the original expressions would. Line numbers,
names, closures and globals of the body do not change.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
from collections.abc import Callable, Sequence
from typing import Any

from ramify.lang.graph import symbolic

PREFIX = "__ramify_"
HELPERS: dict[str, Callable[..., Any]] = {
    f"{PREFIX}piece": symbolic.piece,
    f"{PREFIX}joined": symbolic.joined,
    f"{PREFIX}join": symbolic.join,
    f"{PREFIX}call": symbolic.call,
}
CAUGHT = f"{PREFIX}caught"
"""Name of the function that a rewritten body calls at the beginning of each ``except`` block, and of each
``try`` block with an ``except`` that calls ``recover``."""


def rewritten(body: Callable[..., Any], caught: Callable[[], None]) -> Callable[..., Any]:
    """A copy of `body` in which f-strings, `join` and `str` accept symbolic text. `caught` is called in each
    ``except`` block, and in each ``try`` block with an ``except`` that calls ``recover``. `body` itself is
    returned if it cannot be rewritten, for example because its source is missing."""
    if not inspect.isfunction(body):
        return body
    code = _rewritten(body.__code__, body.__code__.co_filename)
    if code is None:
        return body
    names = {**HELPERS, CAUGHT: caught}
    cells = dict(zip(body.__code__.co_freevars, body.__closure__ or (), strict=True))
    closure = tuple(cells.get(name) or types.CellType(names[name]) for name in code.co_freevars)
    function = types.FunctionType(code, body.__globals__, body.__name__, body.__defaults__, closure)
    function.__kwdefaults__ = body.__kwdefaults__
    return function


@functools.lru_cache(maxsize=256)
def _rewritten(code: types.CodeType, path: str) -> types.CodeType | None:
    """The rewritten code of a function. None if the function's source is missing, has changed since the
    function was compiled, or is not a ``def`` that can be rewritten."""
    try:
        if not _is_of(code, _compile("".join(linecache.getlines(path)), code)):
            return None
        lines, first = inspect.getsourcelines(code)
        # An indented function is parsed below an "if": dedenting would change multi-line strings.
        tree = ast.parse("if 1:\n" * lines[0][:1].isspace() + "".join(lines))
    except (OSError, SyntaxError):
        return None
    top = tree.body[0].body if isinstance(tree.body[0], ast.If) else tree.body
    function = top[0] if len(top) == 1 else None
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.name != code.co_name:
        return None  # a lambda, or a function without a def of its own
    if "__class__" in code.co_freevars or any(map(_is_mangled, ast.walk(function))):
        return None
    function.decorator_list = []
    ast.increment_lineno(function, first - lines[0][:1].isspace() - 1)
    return _compiled(_Rewriter().visit(function), code, (*code.co_freevars, *HELPERS, CAUGHT))


def _is_of(code: types.CodeType, module: types.CodeType) -> bool:
    """Whether `module`, the present source compiled anew, contains `code`. If not, the source has changed
    since `code` was compiled."""
    inner = [constant for constant in module.co_consts if isinstance(constant, types.CodeType)]
    return code in inner or any(_is_of(code, one) for one in inner)


def _compiled(
    function: ast.FunctionDef | ast.AsyncFunctionDef, like: types.CodeType, free: Sequence[str]
) -> types.CodeType:
    outer = _factory(function, free)
    module = _compile(ast.fix_missing_locations(ast.Module([outer], [])), like)
    return _inner(_inner(module, outer.name), function.name)


def _compile(source: str | ast.Module, like: types.CodeType) -> types.CodeType:
    """The code of a module, compiled with the same ``from __future__ import annotations`` setting as
    `like`."""
    flags = like.co_flags & annotations.compiler_flag
    code: types.CodeType = compile(source, like.co_filename, "exec", flags=flags, dont_inherit=True)
    return code


def _factory(function: ast.stmt, free: Sequence[str]) -> ast.FunctionDef:
    """A function that contains `function`. Its parameters are the names in `free`, which thereby are closure
    variables of `function`."""
    made = ast.parse(f"def {PREFIX}outer({', '.join(free)}): pass").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.body = [function]
    return made


def _inner(code: types.CodeType, name: str) -> types.CodeType:
    return next(
        constant
        for constant in code.co_consts
        if isinstance(constant, types.CodeType) and constant.co_name == name
    )


def _is_mangled(node: ast.AST) -> bool:
    """Whether the node has a private name (``__x``), which Python mangles inside a class."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.startswith("__") and not name.endswith("__")


class _Rewriter(ast.NodeTransformer):
    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        pieces: list[ast.expr] = []
        for value in node.values:
            if not isinstance(value, ast.FormattedValue):
                pieces.append(value)
                continue
            conversion = ast.Constant("" if value.conversion < 0 else chr(value.conversion))
            spec = ast.Constant("") if value.format_spec is None else self.visit(value.format_spec)
            pieces.append(_call("piece", [self.visit(value.value), conversion, spec], value))
        return _call("joined", pieces, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        plain = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
        if plain and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
            return _call("join", [node.func.value, *node.args], node)
        if plain and isinstance(node.func, ast.Name) and node.func.id in ("str", "type"):
            return _call("call", [node.func, *node.args], node)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, _caught(node))
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        recovers = any(
            isinstance(inner, ast.Attribute) and inner.attr == "recover"
            for handler in node.handlers
            for inner in ast.walk(handler)
        )
        self.generic_visit(node)
        if recovers:
            node.body.insert(0, _caught(node))
        return node


def _caught(at: ast.stmt | ast.ExceptHandler) -> ast.stmt:
    return ast.copy_location(ast.Expr(_call(CAUGHT.removeprefix(PREFIX), [], at)), at)


def _call(helper: str, arguments: list[ast.expr], at: ast.AST) -> ast.expr:
    call = ast.Call(ast.Name(f"{PREFIX}{helper}", ast.Load()), arguments, [])
    return ast.copy_location(call, at)
