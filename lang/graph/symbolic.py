"""Symbolic values: placeholders, in a traced program, for results and arguments.

The values of the results and arguments are known only in a run. Symbolic text can be concatenated and
appended, and fields of typed results can be read. Every other operation raises `NotConcrete`, because a graph
cannot express a control flow that depends on such an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast, get_args

from ramify.graph_text import Change
from ramify.lang.program.nodes import Interpolated, Node, ResultRef, Step
from ramify.lang.typed.static_type import StaticType, static_type


class NotConcrete(BaseException):
    """The exception of operations that need the concrete value of a symbolic value. A subclass of
    `BaseException`, so that ``except Exception`` in a program does not catch it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message, self.remedy = message, remedy


@dataclass(frozen=True)
class About:
    """The description of a symbolic value in errors."""

    what: str
    """The name of the value in messages."""
    remedy: str
    report: Callable[[NotConcrete], None]


class Symbolic:
    """A placeholder for a value that is known only in a run."""

    def __init__(self, about: About) -> None:
        self._about = about

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Refuse to tell the type. `isinstance` reads this property when ``type(value)`` does not decide."""
        refuse(self, "its type")

    def __getattr__(self, name: str) -> NoReturn:
        refuse(self, f"its {name}")


def refuse(unknown: Symbolic, question: str) -> NoReturn:
    """Raise `NotConcrete`, because the program asks `question` of the symbolic value `unknown`."""
    about = unknown._about
    error = NotConcrete(
        f"{about.what} is not known before the program runs, and this line asks for {question}.",
        f"{CHOOSE} {about.remedy}" if question in (TRUTH, COMPARISON) else about.remedy,
    )
    about.report(error)
    raise error


TRUTH, COMPARISON = "whether it is true", "a comparison"
CHOOSE = "rm.when(value, {…}) appends what it chooses, and rm.repeat(…) repeats until it has a value."
QUESTIONS = {
    TRUTH: ("bool",),
    "a number": ("int", "float", "complex", "index", "round", "abs", "neg", "pos", "ceil", "floor", "trunc"),
    "its length": ("len",),
    "its items": ("iter", "next", "reversed", "getitem", "setitem", "delitem"),
    "what is in it": ("contains",),
    COMPARISON: ("eq", "ne", "lt", "le", "gt", "ge"),
    "its hash, to look something up": ("hash",),
    "a finished string": ("str", "repr", "format", "bytes", "fspath"),
    "arithmetic": (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor"),
        *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rdivmod", "rpow", "rand", "ror", "rxor"),
    ),
    "a call of it": ("call", "await", "enter", "aenter", "aiter"),
}
"""The name of a question in error messages → the special methods that ask the question."""


def _refusing(question: str) -> Callable[..., NoReturn]:
    return lambda self, *args, **kwargs: refuse(self, question)


for _question, _names in QUESTIONS.items():
    for _name in _names:
        setattr(Symbolic, f"__{_name}__", _refusing(_question))


class SymbolicText(Symbolic, Node):
    """Text with symbolic parts. It can be concatenated with other text."""

    def __init__(self, about: About, parts: Sequence[str | ResultRef]) -> None:
        self.__dict__.update(_about=about, parts=tuple(parts))

    parts: tuple[str | ResultRef, ...]

    def steps(self) -> Iterator[Step]:
        yield Interpolated(self.parts)

    def __add__(self, other: object) -> Node:
        return self._with(self, other) if _is_text(other) else Node.__add__(self, other)

    def __radd__(self, other: object) -> Node:
        return self._with(other, self) if _is_text(other) else Node.__radd__(self, other)

    def __getattr__(self, name: str) -> Any:
        """The method `name` of `str`, if `Change` lists it and the text consists of a single result or
        argument. Raises `NotConcrete` for any other name."""
        part = self.parts[0] if len(self.parts) == 1 else None
        if name not in get_args(Change) or part is None or isinstance(part, str):
            refuse(self, f"its {name}")

        def change(*arguments: Any) -> SymbolicText:
            if arguments:
                refuse(self, f"its {name} with arguments")
            later = replace(part, then=(*part.then, cast(Change, name)))
            return SymbolicText(self._about, (later,))

        return change

    def _with(self, *texts: Any) -> SymbolicText:
        parts: list[str | ResultRef] = []
        for text in texts:
            parts += (text,) if type(text) is str else text.parts
        return SymbolicText(self._about, parts)


class SymbolicArgument(SymbolicText):
    """An argument, or a value inside an argument. The value may be any JSON value. In text the value is
    written as by Python's `str`."""

    def __getitem__(self, key: Any) -> SymbolicArgument:
        (part,) = self.parts
        if type(key) not in (str, int) or isinstance(part, str) or part.then:
            refuse(self, "its items")
        return SymbolicArgument(self._about, (replace(part, path=(*part.path, key)),))


class SymbolicValue(Symbolic):
    """A typed result, or a part of a typed result. The program can return it. A field can be read if every
    value of the type has the field. A value of type str, int, float or bool can be put into text."""

    # A field of the result may have any name, so attributes of this class begin with an underscore.
    def __init__(
        self, about: About, source: ResultRef, kind: Any = None, shape: StaticType | None = None
    ) -> None:
        super().__init__(about)
        self._source, self._kind, self._shape = source, kind, shape

    def __getattr__(self, name: str) -> Any:
        shape = self._of_type()
        return self._part(name, None if shape is None else shape.attribute(name), f"its {name}")

    def __getitem__(self, key: Any) -> Any:
        shape = self._of_type()
        return self._part(key, None if shape is None else shape.item(key), "its items")

    def as_text(self) -> SymbolicText | None:
        """The symbolic text that stands for ``str`` of the value; None for types other than str, int, float
        and bool."""
        shape = self._of_type()
        scalar = None if shape is None else shape.scalar
        if scalar is None:
            return None
        return SymbolicText(self._about, (replace(self._source, type=scalar),))

    def _of_type(self) -> StaticType | None:
        if self._shape is None and self._source.index is None:
            self._shape = static_type(self._kind)
        return self._shape

    def _part(self, key: str | int, shape: StaticType | None, question: str) -> Any:
        if shape is None:
            refuse(self, question)
        source = replace(self._source, path=(*self._source.path, key))
        part = SymbolicValue(self._about, source, shape=shape)
        return part.as_text() if shape.scalar == "str" else part


class SymbolicDecision(SymbolicValue):
    """The result of a `decide`. In text, the result of a single question stands for its value's text, which
    is one of `texts`."""

    def __init__(self, about: About, source: ResultRef, shape: StaticType, texts: tuple[str, ...]) -> None:
        super().__init__(about, source, shape=shape)
        self.texts = texts

    def as_text(self) -> SymbolicText | None:
        return getattr(self, "text", None)


class SymbolicCalls(SymbolicValue):
    """The calls of a turn of tool calls. They can be awaited and returned."""

    def __await__(self) -> Generator[Any, None, SymbolicCalls]:
        return self
        yield


def _is_text(value: object) -> bool:
    return issubclass(type(value), str | SymbolicText)


# --- what `ramify.lang.graph.rewrite` calls instead of Python's own --------------------------------


CONVERSIONS: dict[str, Callable[[Any], str]] = {"s": str, "r": repr, "a": ascii}


def piece(value: Any, conversion: str, spec: Any) -> Any:
    """The text of one replacement field of an f-string: a string, or symbolic text."""
    if conversion in ("", "s") and type(spec) is str and not spec:
        value = _text_of(value)
        if issubclass(type(value), SymbolicText):
            return value
    if conversion:
        value = CONVERSIONS[conversion](value)
    return format(value, spec)


def _text_of(value: Any) -> Any:
    text = value.as_text() if issubclass(type(value), SymbolicValue) else None
    return value if text is None else text


def joined(*pieces: Any) -> Any:
    """The concatenation of the pieces of an f-string."""
    return _put_together("", pieces)


def join(separator: Any, items: Any) -> Any:
    """The result of ``separator.join(items)``, where `items` may contain symbolic text."""
    if type(separator) is not str or issubclass(type(items), Symbolic | str):
        return separator.join(items)
    return _put_together(separator, list(items))


def _put_together(separator: str, items: Iterable[Any]) -> Any:
    items = list(items)
    unknown = next((item for item in items if issubclass(type(item), SymbolicText)), None)
    if unknown is None or not all(_is_text(item) for item in items):
        return separator.join(items)
    parts: list[Any] = []
    for item in items:
        parts += (separator, item) if parts and separator else (item,)
    return unknown._with(*parts)


def call(function: Any, value: Any) -> Any:
    """The result of ``function(value)``, for a function named ``str`` or ``type``. Python's own `str` makes
    symbolic text of a symbolic value; Python's own `type` raises `NotConcrete` for a symbolic value."""
    if function is str:
        value = _text_of(value)
        if issubclass(type(value), SymbolicText):
            return value
    if function is type and issubclass(type(value), Symbolic):
        refuse(value, "its type")
    return function(value)
