"""Writes the tables in docs/models.md: tiny random models of every architecture of transformers, run.

``python docs/models_table.py``, 3 minutes. With ``--check`` it only compares, and exits with 1
where they differ.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import traceback
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import generated_part

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from ramify.errors import UnsupportedField  # noqa: E402
from ramify.runtime.model.config import Family  # noqa: E402
from ramify.runtime.model.transformers.trace import shape_of  # noqa: E402
from tests.model.architectures import save_tiny, tiny_config  # noqa: E402
from tests.model.equality import assert_engine_equal, assert_logits_equal, loaded  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- models: written by `python docs/models_table.py` from runs of tiny random models -->\n"
END = "<!-- /models -->"
NAMES = {"gemma3_text": "gemma3"}
"""Our name of a family by the name in transformers."""

NEVER_TINY = {"phi4_multimodal", "cohere_compass_text", "xmod"}
"""Their small configs need more than `tiny_config` knows."""


@dataclass
class Row:
    model_type: str
    architecture: str
    refusal: str = ""
    logits: bool = False
    engine: bool = False


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
    """None where a tiny config cannot be made, or the model is a part of another one."""
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
        return row
    with tempfile.TemporaryDirectory() as folder:
        reference = save_tiny(config, Path(folder))
        model = loaded(Path(folder))
        row.logits = passes(assert_logits_equal, reference, model)
        row.engine = passes(assert_engine_equal, reference, model)
    return row


def passes(check: object, *args: object) -> bool:
    try:
        check(*args)  # type: ignore[operator]
    except AssertionError:
        traceback.print_exc()
        return False
    return True


def table() -> str:
    rows = survey()
    own = {NAMES.get(name, name): "" for name in get_args(Family)}
    lines = ["", "| family | class in transformers | by | float32 equality | prefix sharing |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in rows:
        if row.refusal:
            continue
        name = NAMES.get(row.model_type, row.model_type)
        by = "native, transformers" if name in own else "transformers"
        lines.append(
            f"| {name} | {row.architecture} | {by} | {'yes' if row.logits else 'no'} "
            f"| {'yes' if row.engine else 'no'} |"
        )
    reasons = defaultdict(list)
    for row in rows:
        if row.refusal:
            reasons[row.refusal].append(row.model_type)
    lines += ["", "| refused, because | families |", "| --- | --- |"]
    for reason, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| {reason.replace('|', '/')} | {', '.join(names)} |")
    served = sum(not row.refusal for row in rows)
    lines += [
        "",
        f"{served} of {len(rows)} architectures of transformers {transformers.__version__} run.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    logging.disable()
    torch.set_num_threads(1)  # matrices this small are slower on two
    raise SystemExit(generated_part.main(PAGE, BEGIN, END, table()))
