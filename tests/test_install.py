"""Installing as the docs say, in an environment of its own: a clone, then a copy, then the clone again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

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
