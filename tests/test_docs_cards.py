"""GPUs in the docs: a table of `docs/kernels.md` says what has run, and no other page claims more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "kernels.md"
KERNELS = ROOT / "kernels" / "triton"
HEADING = "## What has run on which card"
UNKNOWN = "not measured"
ESTIMATE = "[estimate, not measured]"

Rows = list[list[str]]


def tables() -> tuple[Rows, Rows]:
    """The cells of the tables of parts and of visits, without headings."""
    section = PAGE.read_text().split(f"\n{HEADING}\n")[1].split("\n## ")[0]
    found = re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE)
    parts, visits, *_ = (
        [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()[2:]]
        for table in found
    )
    return parts, visits


PARTS, VISITS = tables()


def fault(cell: str, visits: Rows) -> str:
    """The reason why a cell about a card is wrong; "" if it is right."""
    if cell == UNKNOWN:
        return ""
    named = re.match(r"(.+), (\d{4}-\d\d-\d\d): \S", cell)
    if not named:
        return f"neither {UNKNOWN!r} nor 'CARD, YYYY-MM-DD: result'"
    if not any((card, date) == named.groups() and all(rest) for card, *rest, date, _ in visits):
        return "no visit to that card on that date is in the table, with driver, torch and triton"
    return ""


# --- the table ----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", PARTS, ids=lambda row: row[0][:40])
def test_a_row_names_files_that_exist_and_a_card_or_none(row: list[str]) -> None:
    part, without, tests, card = row
    for cell, folder in ((part, ""), (without, "tests/kernels"), (tests, "tests/gpu")):
        for name in re.findall(r"`([\w/]+\.py)`", cell):
            assert (ROOT / folder / name).is_file() or (ROOT / name).is_file(), name
    for kernel in re.findall(r"`([a-z0-9_/]+)`", part):
        assert (KERNELS / f"{kernel}.py").is_file(), kernel
    assert ".py`" in without, "what the CPU shows"
    assert tests == "none" or ".py`" in tests
    assert not fault(card, VISITS), part


def test_every_kernel_and_every_test_for_a_card_is_in_the_table() -> None:
    parts = " ".join(part for part, *_ in PARTS)
    kernels = {
        str(path.relative_to(KERNELS).with_suffix(""))
        for path in KERNELS.rglob("*.py")
        if re.search(r"^@(?:triton\.)?jit\b", path.read_text(), re.MULTILINE)
    }
    assert {"norm", "tiles/merge"} <= kernels, "kernels are found by their decorator"
    assert {name for name in kernels if f"`{name}`" not in parts} == set()
    tests = {f"`{path.name}`" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {name for name in tests if not any(name in row[2] for row in PARTS)} == set()


# --- other pages --------------------------------------------------------------------------------

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CARD = re.compile(r"\b(?:[ABH][12]00|L40?S?|RTX|Hopper|GPUs?|CUDA|cards?)\b")
SPEED = re.compile(r"\d (?:[mu]?s|[GT]B/s|TFLOP/s|tokens/s)\b|\d%|\d times as|\b(?:fast|slow)er\b")


def claims(text: str) -> list[str]:
    """Clauses about the speed of a card that are not marked as estimates."""
    paragraphs = re.split(r"\n\s*\n|\n(?=\||- |\d\. )", text)
    clauses = [clause for each in paragraphs for clause in re.split(r"(?<=[.;])\s", each)]
    return [each for each in clauses if CARD.search(each) and SPEED.search(each) and ESTIMATE not in each]


@pytest.mark.parametrize("page", [page for page in PAGES if page != PAGE], ids=lambda page: page.name)
def test_other_pages_give_no_speed_of_a_card(page: Path) -> None:
    assert claims(page.read_text()) == [], "figures of cards are in docs/kernels.md alone"
