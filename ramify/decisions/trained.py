"""Checkpoints that were trained to answer typed questions, recognised by their files.

A checkpoint whose answer is a token behind a prompt runs in its own layout. Others read the answer from a
head of their own, or ask questions that a `Question` cannot carry: their decisions are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ramify.decisions.decider import FILE as DECIDER_FILE
from ramify.decisions.decider import DeciderConfig, decider_config
from ramify.decisions.layouts import Form, Layout
from ramify.decisions.logit_score import FILE as LOGIT_SCORE_FILE
from ramify.decisions.logit_score import LogitScoreConfig, logit_score_config
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import Generate, Segment
from ramify.questions import Question

_OTHERS = {
    "decision_config.json": "a checkpoint with a decision readout of its own, as PPLX-Decider has",
    "joint_head_config.json": "a Clef checkpoint",
    "kev_config.json": "a Kev checkpoint",
    "laya_config.json": "a Laya checkpoint",
    "lev_release.json": "a lev checkpoint",
    "openjev_config.json": "an OpenJev checkpoint",
    "rl_agent_config.json": "a Laya checkpoint",
    "strands_decider_config.json": "a Strands Decider checkpoint",
}
"""File → kind of checkpoint that is not supported."""
FILES = frozenset({DECIDER_FILE, LOGIT_SCORE_FILE, *_OTHERS})
"""The files that tell how a checkpoint was trained to answer questions."""


@dataclass(frozen=True)
class Other:
    """A checkpoint that answers questions in a way that is not supported. `kind` is "a Kev checkpoint", and
    `source` is the file or the metadata that says so."""

    kind: str
    source: str

    layout = "unsupported"
    """Not empty, so that programs send messages, as for any trained layout, and are refused."""

    @property
    def refusing(self) -> Layout:
        """A layout that raises `UnsupportedField` when it is used."""
        return Layout(self.layout, self._forms, self._state)

    def _forms(self, question: Question, permutations: int) -> list[Form]:
        self._refuse()

    def _state(self, request: Generate) -> tuple[Segment, ...]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedField(
            f"This is {self.kind} ({self.source}), whose way to answer questions is not supported.",
            field="decide.layout",
            remedy="Name the layout verbatim, labels or isolated to ask it as a plain language model.",
        )


Trained = DeciderConfig | LogitScoreConfig | Other


def trained(weights: Path, metadata: Mapping[str, Any]) -> Trained | None:
    """The way in which a checkpoint was trained to answer questions; None if its files name none.

    weights : a folder, or a GGUF file, beside which decider checkpoints keep their configuration
    metadata : the GGUF file's; empty for a folder

    Raises `InvalidRequest` if a file has a wrong value, or names a layout that is not known.
    """
    folder = weights if weights.is_dir() else weights.parent
    if (folder / DECIDER_FILE).is_file():
        return decider_config(_read(folder / DECIDER_FILE))
    key = f"{metadata.get('general.architecture')}.decision.type"  # set by llama.cpp's converter
    if key in metadata:
        return Other(f"a decision model of the type {metadata[key]!r}", key)
    if not weights.is_dir():
        return None
    for name, kind in _OTHERS.items():
        if (folder / name).is_file():
            return Other(kind, name)
    if (folder / LOGIT_SCORE_FILE).is_file():
        return logit_score_config(_read(folder / LOGIT_SCORE_FILE))
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}.", field="model") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{path} is not a JSON object.", field="model")
    return found
