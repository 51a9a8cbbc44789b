"""mypy and pyright know the types of programs, find the mistakes in `typed_program`, and accept guides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import blocks

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "build" / "types"
PROGRAM = Path(__file__).with_name("typed_program.py")

MYPY = """
[mypy]
python_version = 3.11
strict = true
namespace_packages = false
ignore_missing_imports = true
follow_imports = skip
[mypy-ramify.*]
follow_imports = silent
[mypy-pydantic.*]
follow_imports = silent
"""
"""Of the libraries only pydantic is followed: reading torch, transformers and numba would take a minute."""


GUIDES = ("programs", "streaming", "testing", "agents", "failures")
GUIDE = """# pyright: standard, reportPossiblyUnboundVariable=false
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, allow-redefinition=True
# mypy: disable-error-code="no-redef"
"""
"""Settings for a guide: its programs are not fully annotated, and several may have one name."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A folder with the guides; beside it build/types, where checkers find the package."""
    subprocess.run([sys.executable, ROOT / ".ci" / "link_types.py"], check=True)
    tree = tmp_path_factory.mktemp("types")
    for name in GUIDES:
        plain = [block.code for block in blocks(ROOT / "docs" / f"{name}.md") if not block.needs]
        (tree / f"{name}_guide.py").write_text(GUIDE + "\n".join(plain))
    return tree


def check(*command: str | Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.slow
def test_mypy(tree):
    (tree / "mypy.ini").write_text(MYPY)
    check(
        "mypy",
        "--config-file",
        tree / "mypy.ini",
        "--cache-dir",
        tree / "cache",
        PROGRAM,
        *sorted(tree.glob("*_guide.py")),
        MYPYPATH=str(PACKAGE),
    )


@pytest.mark.slow
def test_pyright(tree):
    settings = {
        "include": [os.path.relpath(PROGRAM, tree), *(f"{name}_guide.py" for name in GUIDES)],
        "typeCheckingMode": "strict",
        "pythonVersion": "3.11",
        "extraPaths": [str(PACKAGE)],
        "reportUnnecessaryTypeIgnoreComment": "error",
        "reportUnusedExpression": False,
    }
    (tree / "pyrightconfig.json").write_text(json.dumps(settings))
    check("pyright", "--project", tree, "--pythonpath", sys.executable)
