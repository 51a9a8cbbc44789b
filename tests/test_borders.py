"""The rules of the layout: who imports whom, what is packaged, what an import costs.

``python -m tests.test_borders`` prints, for each room, the rooms that it imports and the number of importing
modules.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"ramify": "ramify", "lang": "ramify.lang", "runtime": "ramify.runtime"} | {
    "grammar": "ramify.grammar",
    "radix": "ramify.radix",
    "kernels": "ramify.kernels",
}
ROOF = ("ramify.programs", "ramify.batches", "ramify.bench", "ramify.ray", "ramify.cli")
"""Packages that need `lang` or `runtime`, and that neither of them imports."""


def modules() -> dict[str, Path]:
    """Every module of the package, by its installed name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Full names of the modules that a file imports; TYPE_CHECKING blocks count as well."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


MODULES = modules()
SHARED = {
    name
    for name in MODULES
    if name.startswith("ramify.") and not name.startswith((*list(FOLDERS.values())[1:], *ROOF))
} - {"ramify.__main__"}
"""The modules that all rooms share."""
LEAVES = {name for name in SHARED if MODULES[name].name != "__init__.py"}


def ours(names: set[str]) -> set[str]:
    return {name for name in names if name in MODULES}


def test_every_package_is_listed_in_pyproject() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(config["tool"]["setuptools"]["packages"])
    present = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert listed == present


def test_every_folder_with_modules_is_a_package() -> None:
    for name, path in MODULES.items():
        assert (path.parent / "__init__.py").exists(), f"{name} lies in a folder without __init__.py"


def test_every_room_says_what_it_is_for() -> None:
    """Every package has a docstring, which names all modules if there are more than 16."""
    for name, path in MODULES.items():
        if path.name != "__init__.py":
            continue
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert text, f"{name} does not say what it is for"
        files = {file.stem for file in path.parent.glob("*.py")} - {"__init__"}
        missing = {file for file in files if file not in text}
        assert len(files) <= 16 or not missing, f"the map in {name} lacks {missing}"


@pytest.mark.parametrize("package", ["ramify.radix", "ramify.kernels"])
def test_radix_and_kernels_import_nothing_else_of_ours(package: str) -> None:
    """The only exception: kernels import the folder of compiled code, which kernels and grammars share."""
    allowed = {"ramify.machine_code"} if package == "ramify.kernels" else set()
    for name, path in MODULES.items():
        if name.startswith(package):
            foreign = {used for used in ours(imports(path)) if not used.startswith(package)}
            assert foreign <= allowed, f"{name} imports {foreign}"


def test_grammar_imports_the_shared_words_alone() -> None:
    for name, path in MODULES.items():
        if name.startswith("ramify.grammar"):
            foreign = {used for used in ours(imports(path)) if not used.startswith("ramify.grammar")}
            assert foreign <= SHARED, f"{name} imports {foreign - SHARED}"


@pytest.mark.parametrize("package", ["ramify.radix", "ramify.grammar", "ramify.lang"])
def test_radix_grammar_and_lang_never_import_torch(package: str) -> None:
    for name, path in MODULES.items():
        if name.startswith(package):
            assert not {used for used in imports(path) if used.split(".")[0] == "torch"}, name


def test_lang_and_runtime_share_only_the_words() -> None:
    for name, path in MODULES.items():
        used = ours(imports(path))
        if name.startswith("ramify.lang"):
            allowed = {
                other for other in used if other.startswith(("ramify.lang", "ramify.grammar"))
            } | SHARED
            assert used <= allowed, f"{name} imports {used - allowed}"
        if name.startswith("ramify.runtime"):
            assert not {other for other in used if other.startswith("ramify.lang")}, name


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_leaves_need_the_standard_library_and_msgspec_alone(leaf: str) -> None:
    used = {name.split(".")[0] for name in imports(MODULES[leaf], top_level_only=True)}
    assert used <= set(sys.stdlib_module_names) | {"msgspec", "ramify"}
    assert ours(imports(MODULES[leaf])) <= LEAVES


def test_nobody_below_imports_the_roof() -> None:
    for name, path in MODULES.items():
        if name.startswith(ROOF) or name in ("ramify", "ramify.__main__"):
            continue
        above = {used for used in ours(imports(path)) if used.startswith(ROOF)}
        assert not above, f"{name} imports {above}"


def test_only_one_file_imports_zmq() -> None:
    users = {name for name, path in MODULES.items() if any(u.split(".")[0] == "zmq" for u in imports(path))}
    assert users == {"ramify.runtime.processes.ipc"}


def test_only_one_package_imports_ray() -> None:
    users = {name for name, path in MODULES.items() if any(u.split(".")[0] == "ray" for u in imports(path))}
    assert users
    assert {name for name in users if not name.startswith("ramify.ray.")} == set()
    for name, path in MODULES.items():
        if name != "ramify" and not name.startswith("ramify.ray"):
            first = ours(imports(path, top_level_only=True))
            assert not {used for used in first if used.startswith("ramify.ray")}, name


def test_nothing_is_pickled() -> None:
    for name, path in MODULES.items():
        assert not {
            used for used in imports(path) if used.split(".")[0] in {"pickle", "cloudpickle", "dill"}
        }, name


def test_processes_do_not_import_from_the_working_directory() -> None:
    """Otherwise the folder `ramify` of a clone would hide an installed copy of the package."""
    started = {
        name: [
            node.elts[1]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable"
        ]
        for name, path in MODULES.items()
    }
    assert sum(map(len, started.values())) >= 5
    for name, options in started.items():
        assert {ast.unparse(option) for option in options} <= {"'-P'"}, name


def test_importing_ramify_imports_nothing_heavy() -> None:
    """The import takes 6 ms."""
    heavy = {"torch", "numpy", "transformers", "starlette", "pydantic", "aiohttp", "zmq", "tqdm", "numba"}
    heavy |= {"ray", "pyarrow"}
    code = "import sys, ramify; ramify.ray; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(run.stdout.split())


def test_files_stay_readable() -> None:
    """A file has one responsibility. With more than 600 lines it has more."""
    long = {
        str(path.relative_to(ROOT)): lines
        for path in MODULES.values()
        if (lines := len(path.read_text().splitlines())) > 600
    }
    assert not long


def room_of(module: str) -> str:
    """The room of a module, such as ``runtime.scheduler``; ``ramify`` for the shared modules."""
    if module.startswith(ROOF):
        return ".".join(module.split(".")[:2])
    _, *parts = module.split(".")
    if not parts or parts[0] not in FOLDERS:
        return "ramify"
    inner = parts[0] == "runtime" and MODULES[module].parent.name != "runtime"
    return ".".join(parts[:2]) if inner else parts[0]


def picture() -> dict[str, Counter[str]]:
    """Room → the rooms that its modules import, each with the number of importing modules."""
    arrows: dict[str, Counter[str]] = defaultdict(Counter)
    for name, path in MODULES.items():
        rooms = {room_of(used) for used in ours(imports(path))} - {room_of(name)}
        arrows[room_of(name)].update(rooms)
    return arrows


def test_nothing_in_the_runtime_imports_the_server() -> None:
    assert not [
        room for room, used in picture().items() if not room.startswith("ramify") and "runtime.server" in used
    ]


if __name__ == "__main__":
    for room, used in sorted(picture().items()):
        arrows = ", ".join(f"{name} ({count})" for name, count in used.most_common())
        print(f"{room:18} → {arrows or 'nothing'}")
