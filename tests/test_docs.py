"""The documentation agrees with the code: its Python runs, and its links, paths and functions exist."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.end_to_end.served import Served, serve
from tests.test_words import tracked

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [path for path in DOCS if "```python" in path.read_text()]
SHOWN = {
    ("README.md", "engine"): (r"^[ABCD] Usage\(", r"gen verdict", r"select grade"),
    ("README.md", "server"): (r'\{"city": ".{0,30}"\} \d+\n$',),
}
"""(Guide, backend) → patterns that the output of the guide's blocks for this backend must contain."""


class Block(NamedTuple):
    """A Python block of a guide. `needs`: the word in ``<!-- needs: engine -->`` above it, if any."""

    needs: str
    code: str


def blocks(guide: Path) -> list[Block]:
    found = re.findall(
        r"(?:<!-- needs: (\w+) -->\n)?^```python\n(.*?)^```$", guide.read_text(), re.DOTALL | re.M
    )
    return [Block(needs, code) for needs, code in found]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def guides_that_need(what: str) -> list[Path]:
    return [guide for guide in GUIDES if any(block.needs == what for block in blocks(guide))]


def run(code: str, folder: Path) -> str:
    """Run `code` from a file, as `compile` reads the sources of programs from files; returns the output."""
    (folder / "guide.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "guide.py"], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_output(guide: Path, needs: str, output: str) -> None:
    for pattern in SHOWN.get((name(guide), needs), ()):
        assert re.search(pattern, output), output


# --- code ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("guide", guides_that_need(""), ids=name)
def test_plain_blocks_run_as_one_script(guide: Path, tmp_path: Path) -> None:
    run("\n".join(block.code for block in blocks(guide) if not block.needs), tmp_path)


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.timeout(240)
@pytest.mark.parametrize("guide", guides_that_need("engine"), ids=name)
def test_blocks_that_need_an_engine(guide: Path, tmp_path: Path) -> None:
    for block in blocks(guide):
        if block.needs == "engine":
            check_output(guide, "engine", run(block.code, tmp_path))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve() as served:
        yield served


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.timeout(240)
@pytest.mark.parametrize("guide", guides_that_need("server"), ids=name)
def test_blocks_that_need_a_server(guide: Path, server: Served, tmp_path: Path) -> None:
    for block in blocks(guide):
        if block.needs == "server":
            assert "http://127.0.0.1:30000" in block.code
            code = block.code.replace("http://127.0.0.1:30000", server.url)
            check_output(guide, "server", run(code, tmp_path))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


@pytest.mark.parametrize("script", ["generate.py", "command_line.py", "field_tables.py", "reference.py"])
def test_generated_pages_are_current(script: str) -> None:
    check = [sys.executable, str(ROOT / "docs" / script), "--check"]
    assert subprocess.run(check).returncode == 0, "run `make docs`"


# --- what it names ------------------------------------------------------------------------------


def links(path: Path) -> list[tuple[str, str, str]]:
    """(text, file, heading) of each link to a file."""
    found = re.findall(r"\[([^\[\]]*)\]\(([^)#\s]*)#?([^)\s]*)\)", path.read_text())
    return [link for link in found if "://" not in link[1]]


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to a file's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for _, file, heading in links(path):
        target = path.parent / file if file else path
        assert target.exists(), file
        assert not heading or heading in anchors(target), f"{file}#{heading}"


def definitions(path: Path) -> set[str]:
    """Dotted names of the classes, functions and constants of a file and of its classes."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield prefix + node.name
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + node.name
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))

    return set(walk(ast.parse(path.read_text()).body, ""))


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_functions_that_links_name_are_in_their_files(path: Path) -> None:
    for text, file, _ in links(path):
        if file.endswith(".py") and not text.strip("`").endswith(".py"):
            assert text.strip("`") in definitions(path.parent / file), f"{text} is not in {file}"


@pytest.mark.parametrize("path", [path for path in DOCS if path.name != "files.md"], ids=name)
def test_paths_and_benchmarks_that_are_named_exist(path: Path) -> None:
    tops = "ramify|lang|grammar|runtime|radix|kernels|tests|docs|examples|benchmarks"
    text = path.read_text()
    for named in re.findall(rf"(?<![\w/.])((?:{tops})/[\w/.-]*\w)", text):
        assert (ROOT / named).exists(), named
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), module


# --- decisions ----------------------------------------------------------------------------------

RECORDS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))


@pytest.mark.parametrize("record", RECORDS, ids=name)
def test_a_decision_has_the_template_and_is_in_the_index(record: Path) -> None:
    text = record.read_text()
    assert re.match(r"# [A-Z]", text), "the number is in the file's name alone"
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Rejected", "Consequences"]
    assert f"({record.name})" in (record.parent / "README.md").read_text()


@functools.cache
def sources() -> tuple[list[str], set[str]]:
    """The tracked files without documentation, and the words in them."""
    files = [path for path in tracked() if not path.endswith(".md")]
    return files, {word for path in files for word in re.findall(r"\w+", (ROOT / path).read_text())}


@pytest.mark.parametrize("record", RECORDS, ids=name)
def test_classes_and_paths_that_a_decision_names_exist(record: Path) -> None:
    """Capitalised names in code spans occur in the sources. A path may lack its first folders."""
    files, known = sources()
    for named in re.findall(r"`([^`\n]+)`", record.read_text()):
        if re.fullmatch(r"[A-Z]\w*(?:\.\w+)*(?:\(\))?", named):
            assert set(re.findall(r"\w+", named)) <= known, named
        elif re.fullmatch(r"\w+(?:/\w+)+\.py", named):
            assert any(f"/{path}".endswith(f"/{named}") for path in files), named
