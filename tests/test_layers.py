"""Layers inside the rooms: no two packages import each other, and each room's `__init__` gives their order.

The docstring of a room's `__init__` has a sentence ``Layers, lowest first: a; b.c; own modules; d.`` of the
room's sub-packages and, if it has modules beside them, ``own modules``. A module imports from layers before
its own, and from its own. A package's `__init__` without own modules is a facade and belongs to no layer.

``python -m tests.test_layers`` prints the pairs of packages that import each other, and what goes upwards.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict

import pytest

from tests.test_borders import MODULES, imports, ours

ROOMS = ("ramify.lang", "ramify.runtime", "ramify.grammar", "ramify.radix", "ramify.kernels", "ramify")
OWN = "own modules"
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


def package_of(name: str) -> str:
    return name if name in PACKAGES else name.rpartition(".")[0]


def is_facade(name: str) -> bool:
    """Whether `name` is an `__init__`, which may import its children, or a `__main__`: they have no layer."""
    return name in PACKAGES or name.endswith(".__main__")


Edges = dict[tuple[str, str], set[str]]


@functools.cache
def edges() -> Edges:
    """(importing package, imported package) → texts "module imports module". `__init__` files are left out:
    importing a module of a package executes them, which `test_borders` bounds."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, path in MODULES.items():
        if is_facade(name):
            continue
        for used in ours(imports(path)):
            here, there = package_of(name), package_of(used)
            if here != there and not is_facade(used):
                found[here, there].add(f"{name} imports {used}")
    return found


def circles() -> set[frozenset[str]]:
    return {frozenset(pair) for pair in edges() if pair[::-1] in edges()}


def layers_of(room: str) -> list[str] | None:
    """Full names of the room's packages, lowest layer first; None if the room's docstring gives no order."""
    text = ast.get_docstring(ast.parse(MODULES[room].read_text())) or ""
    found = re.search(r"Layers, lowest first: ([^:]*?)\.(?:\s|$)", text, re.S)
    if found is None:
        return None
    names = [" ".join(name.split()) for name in found.group(1).split(";")]
    return [room if name == OWN else f"{room}.{name}" for name in names]


def packages_of(room: str) -> set[str]:
    """The packages of the room that have modules. The room `ramify` excludes the five others."""
    others = tuple(f"{other}." for other in ROOMS[:-1]) if room == "ramify" else ()
    return {
        package_of(name)
        for name in MODULES
        if not is_facade(name) and name.startswith(f"{room}.") and not name.startswith(others)
    }


def upward(order: list[str], imported: Edges) -> Edges:
    """The imports of a layer from a layer above it."""
    height = {name: at for at, name in enumerate(order)}
    return {
        (low, high): why
        for (low, high), why in imported.items()
        if low in height and high in height and height[low] < height[high]
    }


def test_no_two_packages_import_each_other() -> None:
    assert not {pair: why for pair, why in edges().items() if pair[::-1] in edges()}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_gives_the_order_of_its_layers(room: str) -> None:
    order = layers_of(room)
    if len(packages_of(room)) < 2:
        return
    assert order is not None, f"{room}: no layers in its docstring"
    assert sorted(order) == sorted(packages_of(room))


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down(room: str) -> None:
    assert not upward(layers_of(room) or [], edges())


def test_an_import_upwards_is_found() -> None:
    known = {("low", "high"): {"low.a imports high.b"}, ("high", "low"): {"high.b imports low.c"}}
    assert upward(["low", "high"], known) == {("low", "high"): {"low.a imports high.b"}}
    assert ("ramify.lang.backends", "ramify") in edges(), "imports are found"


if __name__ == "__main__":
    for pair in sorted(map(sorted, circles())):
        one, other = pair
        print(f"{one} -> {other}: {len(edges()[one, other])}, back: {len(edges()[other, one])}")
    for room in ROOMS:
        for (low, high), why in sorted(upward(layers_of(room) or [], edges()).items()):
            print(f"{low} goes up to {high}: {sorted(why)}")
