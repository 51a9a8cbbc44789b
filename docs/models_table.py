"""Writes the tables in docs/models.md: tiny random models of every architecture of transformers, run.

``python docs/models_table.py`` takes 4 minutes. With ``--check`` it only compares, and exits with 1 if the
tables differ.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import generated_part

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from ramify.errors import UnsupportedField  # noqa: E402
from ramify.runtime.model.shape.config import Family  # noqa: E402
from ramify.runtime.model.transformers.trace import shape_of  # noqa: E402
from tests.model.architectures import save_tiny, tiny_config  # noqa: E402
from tests.model.equality import assert_engine_equal, assert_logits_equal, loaded, native  # noqa: E402
from tests.model.own_families import (  # noqa: E402
    FAMILIES,
    assert_gguf_equal,
    assert_lora_equal,
    assert_quantised_equal,
    reference_of,
)

PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- models: written by `python docs/models_table.py` from runs of tiny random models -->\n"
END = "<!-- /models -->"
NAMES = {"gemma3_text": "gemma3"}
"""Name of a family in transformers → Ramify's name."""

NEVER_TINY = {"phi4_multimodal", "cohere_compass_text", "xmod"}
"""Models whose small configs need more than `tiny_config` can make."""


@dataclass
class Row:
    """An architecture, run by the code of transformers."""

    model_type: str
    architecture: str
    refusal: str = ""
    cells: list[str] = field(default_factory=list)
    """The results for float32 equality and for prefix sharing."""

    @property
    def family(self) -> str:
        return NAMES.get(self.model_type, self.model_type)


def survey() -> list[Row]:
    """One row for each causal language model of transformers."""
    names: dict[str, list[str]] = defaultdict(list)
    for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        names[architecture if isinstance(architecture, str) else architecture[0]].append(model_type)
    rows = []
    for architecture, model_types in names.items():
        # The name that the class has in it, of several: llama for LlamaForCausalLM, and not internlm3.
        own = [name for name in model_types if architecture.lower().startswith(name.replace("_", ""))]
        row = tried((own or model_types)[0], architecture)
        if row is not None:
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return sorted(rows, key=lambda row: row.model_type)


def tried(model_type: str, architecture: str) -> Row | None:
    """The row of an architecture; None if it has no tiny config, or is a part of another model."""
    if model_type in NEVER_TINY:
        return None
    row = Row(model_type, architecture)
    try:
        config = tiny_config(model_type)
    except Exception as error:
        print(model_type, error, file=sys.stderr)
        return None
    try:
        shape_of(config)
    except UnsupportedField as error:
        head = f"{architecture} of transformers cannot run on KV pages: "
        if not error.message.startswith(head):
            return None
        row.refusal = error.message.removeprefix(head).removesuffix(".")
        row.cells = ["refused", "refused"]
        return row
    with tempfile.TemporaryDirectory() as folder:
        reference = save_tiny(config, Path(folder))
        model = loaded(Path(folder))
        for check in (assert_logits_equal, assert_engine_equal):
            row.cells.append(cell(check, reference, model))
    return row


def own_cells(family: Family) -> list[str]:
    """Results with Ramify's own code: float32 equality, prefix sharing, GGUF, quantised, LoRA."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = reference_of(family, folder / "float32")
        model = native(folder / "float32")
        cells = [
            cell(assert_logits_equal, reference, model),
            cell(assert_engine_equal, reference, model),
            cell(assert_gguf_equal, family, folder),
            cell(assert_quantised_equal, family, folder / "quantised"),
            cell(assert_lora_equal, family, folder / "lora"),
        ]
    print(family, cells, file=sys.stderr, flush=True)
    return cells


def cell(check: Callable[..., None], *args: object) -> str:
    """The result of `check(*args)`: "yes", "no", or "refused" with the name of the refused field."""
    try:
        check(*args)
    except UnsupportedField as error:
        return f"refused: `{error.field}`"
    except AssertionError:
        traceback.print_exc()
        return "no"
    return "yes"


def tables() -> str:
    rows = survey()
    lines = [
        "",
        "| native family | float32 equality | prefix sharing | GGUF | quantised | LoRA "
        "| by transformers' code: float32 equality | prefix sharing |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for family in FAMILIES:
        found = [row for row in rows if row.family == family]
        by_transformers = [worst(row.cells[place] for row in found) for place in range(2)]
        lines.append(f"| {' | '.join([family, *own_cells(family), *by_transformers])} |")
    others = [row for row in rows if row.family not in FAMILIES]
    lines += [
        "",
        "| family by transformers' code | class in transformers | float32 equality | prefix sharing |",
    ]
    lines.append("| --- | --- | --- | --- |")
    lines += [
        f"| {row.model_type} | {row.architecture} | {' | '.join(row.cells)} |"
        for row in others
        if not row.refusal
    ]
    reasons = defaultdict(list)
    for row in others:
        if row.refusal:
            reasons[row.refusal].append(row.model_type)
    lines += ["", "| refused, because | families |", "| --- | --- |"]
    for reason, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| {reason.replace('|', '/')} | {', '.join(names)} |")
    served = sum(not row.refusal or row.family in FAMILIES for row in rows)
    lines += [
        "",
        f"{served} of {len(rows)} architectures of transformers {transformers.__version__} run.",
        "",
    ]
    return "\n".join(lines)


def worst(cells: Iterable[str]) -> str:
    """The first of `cells` that is not "yes"; "yes" if there is none."""
    return next((cell for cell in cells if cell != "yes"), "yes")


if __name__ == "__main__":
    logging.disable()
    torch.set_num_threads(1)  # matrices this small are slower on two
    raise SystemExit(generated_part.main(PAGE, BEGIN, END, tables()))
