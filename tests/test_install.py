"""Installing as the docs say; `make install-test` runs the whole of it, in fresh places."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMPILES = """
import ramify
from pathlib import Path
from ramify.grammar.automaton.masks import trie
from ramify.kernels.cpu.parts import packing
from ramify.machine_code import folder
hits = sum(packing._run.stats.cache_hits.values())
print(Path(ramify.__file__).parent, hits, folder("ramify.kernels.cpu"), trie.__name__)
"""


@pytest.mark.slow
def test_a_copy_replaces_a_clone_and_is_replaced(tmp_path: Path) -> None:
    """Compiled code is kept outside the package, so no folder of a removed copy remains to hide the clone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    packages = next(tmp_path.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("-packages"))
    )
    source = tmp_path / "clone"
    source.mkdir()
    for name in ("ramify", "lang", "grammar", "runtime", "radix", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    def install(*what: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--quiet"]
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall"]
        done = subprocess.run([*pip, "install", *options, *what], cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def imported() -> list[str]:
        run = subprocess.run(
            [python, "-c", COMPILES], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return run.stdout.split()

    install("--editable", ".")
    clone = imported()
    install(".")
    copy = imported()
    assert Path(copy[0]) == packages / "ramify"
    assert copy[1:] == ["1", *clone[2:]], "the copy has the clone's sources, and so its compiled code"
    assert not list(packages.rglob("*.nb[ic]"))
    install("--editable", ".")
    assert imported()[0] == clone[0]


def test_a_script_in_a_clone_finds_the_clone_without_an_editable_installation() -> None:
    code = (
        "import sys; sys.meta_path[:] = [one for one in sys.meta_path if '__editable__' not in str(one)]\n"
        "sys.path.insert(0, sys.argv[1]); import ramify, ramify.runtime.config; print(ramify.gen.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True)
    assert done.stdout.startswith("ramify.lang"), done.stderr


# --- the environment of a clone ---------------------------------------------------------------------


class Clone:
    """A clone whose ``make`` only notes what it is asked to install."""

    def __init__(self, folder: Path) -> None:
        (folder / "ramify").mkdir(parents=True)
        (folder / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "link_types.py", folder / ".ci")
        (folder / "pyproject.toml").write_text('[project]\ndependencies = ["torch>=2"]\n')
        self.folder = folder
        self.asked: list[str] = []
        self.fails: BaseException | int = 0

    def make(self, *extras: str) -> list[str]:
        """Install as ``make`` does; returns what is asked for."""
        install = script("install")
        install.ROOT = self.folder
        install.make_environment = self._environment
        install.install = self._install
        self.asked = []
        install.main(str(self.folder / ".venv"), *extras)
        return self.asked

    def _environment(self, venv: Path) -> None:
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / "python").touch()

    def _install(self, venv: Path, what: str) -> int:
        self.asked.append(what)
        if isinstance(self.fails, BaseException):
            raise self.fails
        return self.fails


def test_an_environment_is_installed_once_and_keeps_its_extras(tmp_path: Path) -> None:
    clone = Clone(tmp_path / "clone")
    assert clone.make() == ["."]
    assert clone.make() == []
    assert clone.make("dev") == [".[dev]"]
    assert clone.make() == []
    (clone.folder / "pyproject.toml").write_text('[project]\ndependencies = ["torch>=3"]\n')
    assert clone.make() == [".[dev]"]


def test_an_interrupted_installation_is_begun_anew(tmp_path: Path) -> None:
    clone = Clone(tmp_path / "clone")
    clone.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        clone.make()
    half_unpacked = clone.folder / ".venv" / "half"
    half_unpacked.touch()
    clone.fails = 0
    assert clone.make() == ["."]
    assert not half_unpacked.exists()


def test_a_failed_upgrade_leaves_the_environment(tmp_path: Path) -> None:
    clone = Clone(tmp_path / "clone")
    clone.make()
    kept = clone.folder / ".venv" / "kept"
    kept.touch()
    clone.fails = 1
    with pytest.raises(SystemExit):
        clone.make("dev")
    clone.fails = 0
    assert clone.make("dev") == [".[dev]"]
    assert kept.exists()


def test_a_moved_clone_gets_a_new_environment(tmp_path: Path) -> None:
    clone = Clone(tmp_path / "clone")
    clone.make()
    stale = clone.folder / ".venv" / "bin" / "ramify"
    stale.touch()
    clone.folder = clone.folder.rename(tmp_path / "moved")
    assert clone.make() == ["."]
    assert not (clone.folder / ".venv" / "bin" / "ramify").exists()


@pytest.mark.parametrize(
    ("failing", "settings", "ways"),
    [
        ((), {}, ["uv --torch-backend"]),
        (("--torch-backend",), {}, ["uv --torch-backend", "uv"]),
        (("uv",), {}, ["uv --torch-backend", "uv", "pip"]),
        (("quiet uv",), {}, ["pip"]),
        ((), {"no-index": "true"}, ["uv --no-index"]),
        ((), {"no-index": "0", "timeout": "60"}, ["uv --torch-backend"]),
        ((), {"only-binary": ":all:"}, ["pip"]),
    ],
)
def test_torch_comes_from_pytorch_by_uv_else_from_the_index_else_by_pip(
    monkeypatch: pytest.MonkeyPatch, failing: tuple[str, ...], settings: dict[str, str], ways: list[str]
) -> None:
    install = script("install")
    tried: list[str] = []

    def run(command: list[str], settings: dict[str, str]) -> int:
        words = command[2:]
        if words[-1] == "uv":
            return int("quiet uv" in failing)
        tried.append(
            " ".join([words[0], *(word for word in words if word in ("--torch-backend", "--no-index"))])
        )
        return int(any(word in words for word in failing))

    monkeypatch.setenv("TORCH_BACKEND", "cpu")
    install.run = run
    install.settings_of_pip = lambda python: settings
    assert install.install(Path("venv"), ".") == 0
    assert tried == ways


def test_uv_gets_the_settings_of_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://a/simple\nfind-links = /one\n  /two\ntrusted-host = a\n  b:8080\n"
        "proxy = http://proxy:3128\n[install]\nconstraint = /user's/c.txt\n[download]\npre = yes\n"
    )
    for name in ("FIND_LINKS", "CONSTRAINT", "TRUSTED_HOST", "PROXY", "INDEX_URL"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://b/simple")
    install = script("install")
    found = install.settings_of_pip(sys.executable)
    settings = install.variables_of_uv(found)
    assert settings["UV_DEFAULT_INDEX"] == "https://a/simple"
    assert settings["UV_INDEX"] == "https://b/simple"
    assert settings["UV_FIND_LINKS"] == "/one,/two"
    assert settings["UV_CONSTRAINT"] == "/user's/c.txt"
    assert settings["UV_INSECURE_HOST"] == "a b:8080"
    assert settings["HTTPS_PROXY"] == settings["HTTP_PROXY"] == "http://proxy:3128"
    assert "pre" not in found


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"version_info": (3, 10, 13)}, "needs Python 3.11 or later"),
        ({"maxsize": 2**31 - 1}, "needs a 64-bit Python"),
    ],
)
def test_an_unfit_python_is_refused_with_the_remedy(found: dict[str, Any], says: str) -> None:
    install = script("install")
    assert install.unfit() == ""
    here = {"version_info": (3, 11), "maxsize": sys.maxsize, "executable": "/usr/bin/python3"}
    install.sys = SimpleNamespace(**(here | found))
    assert says in install.unfit()
    assert "make PYTHON=" in install.unfit()


def test_an_old_python_can_read_the_script_that_refuses_it() -> None:
    ast.parse((ROOT / ".ci" / "install.py").read_text(), feature_version=(3, 7))


# --- the ways of the page ---------------------------------------------------------------------------


def test_the_page_has_a_way_for_each_kind_of_user() -> None:
    paths, files = script("install_test").page_paths(tests=True)
    assert list(paths) == ["program", "server", "pipeline", "remote", "contributor"]
    assert all(len(commands) <= 6 for commands in paths.values())
    assert "make test" in " ".join(paths["contributor"])
    for commands in paths.values():
        for command in commands:
            used = [word for word in command.split() if word.endswith(".py")]
            assert all(word in files or (ROOT / word).is_file() for word in used)


BLOCKED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def test_remote_programs_need_the_packages_that_the_page_names_and_no_others(tmp_path: Path) -> None:
    paths, files = script("install_test").page_paths(tests=False)
    named = set(next(one for one in paths["remote"] if "pydantic" in one).split()[2:])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    others = {one.partition(">")[0] for one in project["dependencies"]} - named
    blocked = {top for top, owners in packages_distributions().items() if others & set(owners)}
    assert {"torch", "numba", "transformers", "uvicorn"} <= blocked
    code = f"BLOCKED = {blocked}\n{BLOCKED}\n{files['capital.py']}\nrm.OpenAI, rm.RuntimeEndpoint\n"
    code += "rm.gen('x', schema={'type': 'integer'})\n"
    (tmp_path / "capital.py").write_text(code)
    done = subprocess.run([sys.executable, "capital.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
