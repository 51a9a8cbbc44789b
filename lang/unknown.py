"""What a program holds while it is traced, in place of what only a run can tell.

Text can be put together and appended. Whatever else Python asks is refused, as a program that goes by the
answer has a control flow that no graph has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast, get_args

from ramify.graph import Change
from ramify.lang.ir import Filled, Node, Outcoming, Step


class NotKnown(BaseException):
    """Refuses a question about something unknown. No `Exception`, so that programs do not catch it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message, self.remedy = message, remedy


class Unknown:
    """A value that is not there yet.

    `what` names it for people, `remedy` says what a program that needs it can do, and `refuse` is told of
    every refusal.
    """

    def __init__(self, what: str, remedy: str, refuse: Callable[[NotKnown], None]) -> None:
        self.what, self.remedy, self.refuse = what, remedy, refuse

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What `isinstance` looks at, when the type itself did not answer it."""
        refuse(self, "its type")

    def __getattr__(self, name: str) -> NoReturn:
        refuse(self, f"its {name}")


def refuse(unknown: Unknown, question: str) -> NoReturn:
    """Raise `NotKnown`: the program asks for `question`."""
    error = NotKnown(
        f"{unknown.what} is not known before the program runs, and this line asks for {question}.",
        unknown.remedy,
    )
    unknown.refuse(error)
    raise error


QUESTIONS = {
    "whether it is true": ("bool",),
    "a number": ("int", "float", "complex", "index", "round", "abs", "neg", "pos", "ceil", "floor", "trunc"),
    "its length": ("len",),
    "its items": ("iter", "next", "reversed", "getitem", "setitem", "delitem"),
    "what is in it": ("contains",),
    "a comparison": ("eq", "ne", "lt", "le", "gt", "ge"),
    "its hash, to look something up": ("hash",),
    "a finished string": ("str", "repr", "format", "bytes", "fspath"),
    "arithmetic": (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor"),
        *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rdivmod", "rpow", "rand", "ror", "rxor"),
    ),
    "a call of it": ("call", "await", "enter", "aenter", "aiter"),
}
"""What is asked for → the special methods that ask for it."""


def _refusing(question: str) -> Callable[..., NoReturn]:
    return lambda self, *args, **kwargs: refuse(self, question)


for _question, _names in QUESTIONS.items():
    for _name in _names:
        setattr(Unknown, f"__{_name}__", _refusing(_question))


class UnknownText(Unknown, Node):
    """Text, some parts of which are not there yet. It can be put behind and before other text."""

    def __init__(
        self, what: str, remedy: str, refuse: Callable[[NotKnown], None], parts: Sequence[str | Outcoming]
    ) -> None:
        object.__setattr__(self, "__dict__", {"what": what, "remedy": remedy, "refuse": refuse})
        self.__dict__["parts"] = tuple(parts)

    parts: tuple[str | Outcoming, ...]

    def steps(self) -> Iterator[Step]:
        yield Filled(self.parts)

    def __add__(self, other: object) -> Node:
        return self._with(self, other) if _is_text(other) else Node.__add__(self, other)

    def __radd__(self, other: object) -> Node:
        return self._with(other, self) if _is_text(other) else Node.__radd__(self, other)

    def __getattr__(self, name: str) -> Any:
        """The methods that a graph can note, of a text that is a single result or argument."""
        part = self.parts[0] if len(self.parts) == 1 else None
        if name not in get_args(Change) or part is None or isinstance(part, str):
            refuse(self, f"its {name}")

        def change(*arguments: Any) -> UnknownText:
            if arguments:
                refuse(self, f"its {name} with arguments")
            later = replace(part, then=(*part.then, cast(Change, name)))
            return UnknownText(self.what, self.remedy, self.refuse, (later,))

        return change

    def _with(self, *texts: Any) -> UnknownText:
        parts: list[str | Outcoming] = []
        for text in texts:
            parts += (text,) if type(text) is str else text.parts
        return UnknownText(self.what, self.remedy, self.refuse, parts)


def _is_text(value: object) -> bool:
    return issubclass(type(value), str | UnknownText)


# --- what `ramify.lang.rewrite` puts in the place of Python's own --------------------------------


CONVERSIONS: dict[str, Callable[[Any], str]] = {"s": str, "r": repr, "a": ascii}


def piece(value: Any, conversion: str, spec: Any) -> Any:
    """One piece of an f-string: a string, or text that is not there yet."""
    if type(value) is UnknownText and conversion in ("", "s") and type(spec) is str and not spec:
        return value
    if conversion:
        value = CONVERSIONS[conversion](value)
    return format(value, spec)


def joined(*pieces: Any) -> Any:
    """The pieces of an f-string as one text."""
    return _put_together("", pieces)


def join(separator: Any, items: Any) -> Any:
    """``separator.join(items)``."""
    if type(separator) is not str or issubclass(type(items), Unknown | str):
        return separator.join(items)
    return _put_together(separator, list(items))


def _put_together(separator: str, items: Iterable[Any]) -> Any:
    items = list(items)
    unknown = next((item for item in items if type(item) is UnknownText), None)
    if unknown is None or not all(_is_text(item) for item in items):
        return separator.join(items)
    parts: list[Any] = []
    for item in items:
        parts += (separator, item) if parts and separator else (item,)
    return unknown._with(*parts)


def call_of_one(function: Any, value: Any) -> Any:
    """``function(value)``, where the function may be `str` or `type`."""
    if function is str and type(value) is UnknownText:
        return value
    if function is type and issubclass(type(value), Unknown):
        refuse(value, "its type")
    return function(value)
