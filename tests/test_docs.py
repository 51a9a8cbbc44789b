"""The documentation says what the code does: generated parts are current, and the README's code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.served import serve

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_generated_pages_are_current() -> None:
    check = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    assert subprocess.run(check).returncode == 0, "run `make docs`"


def test_the_readme_is_short_and_its_blocks_are_tested() -> None:
    assert len(README.splitlines()) < 200
    assert len(BLOCKS) == 3, "a new block needs a test here"


def test_every_link_of_the_docs_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.weights
@pytest.mark.timeout(240)
def test_the_program() -> None:
    out = run(BLOCKS[0])
    assert re.match(r"[ABCD] Usage\(", out)
    assert "gen verdict" in out
    assert "select grade" in out


def test_the_scripted_program() -> None:
    run(BLOCKS[1])


@pytest.mark.weights
@pytest.mark.timeout(240)
def test_the_client() -> None:
    with serve() as served:
        out = run(BLOCKS[2].replace("http://127.0.0.1:30000", served.url))
    assert re.match(r'\{"city": ".{0,30}"\} \d+\n$', out)
