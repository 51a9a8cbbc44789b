"""Tokenisation of questions behind a state.

    state                 <|im_start|>user\\nThe parcel is broken.
    opening               \\n\\n
    body of the form      Which team?\\n- billing\\n- returns\\nAnswer with exactly one of these options, …
    closing               <|im_end|>\\n<|im_start|>assistant\\n
    paths                 billing; returns

Opening, body and closing are tokenised as one text, apart from the state. So the state's ids are the same for
all questions. A path has the ids that its text adds behind the closing. All texts of a request are encoded
in two batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from ramify.decisions.layouts import LAYOUTS, Form, Layout, Spelling
from ramify.engine_messages import DecisionForm, DecisionTokens, WrittenQuestion
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatMessage, Segment
from ramify.model_info import ThinkingFormat
from ramify.questions import Decide

PLACE = "\U0010fffd"
"""A private-use character that holds the place of a question in a chat, while the template renders it."""
BLANK_LINE = "\n\n"
PLAIN_CLOSING = "\nAnswer:"
_LAST_WORD = re.compile(r"\S*\s*$")
"""The end of a closing that may share a token with an option: tokens span no earlier white space."""
MAX_AUTO_TOKENS = 8
"""Most tokens of an option that the layout "auto" writes verbatim."""
MAX_FORM_CHARACTERS = 8 << 20
"""Most characters of all forms of a request: they take the tokenizer a few seconds."""

EncodeAll = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Texts → token ids of each. The texts do not begin the prompt."""
Paths = dict[str, tuple[int, ...]]
"""Text of a spelling → its token ids behind the closing."""


class Surroundings(NamedTuple):
    """The texts around a question."""

    opening: str
    closing: str
    bare: bool = False
    """Whether a trained layout has written the state, so that no begin-of-sequence token is added."""


def with_place(chat: Sequence[ChatMessage]) -> tuple[tuple[ChatMessage, ...], str]:
    """(`chat` with `PLACE` at the end of its last user turn, the opening). If the last turn has another role,
    a user turn is added, and the opening is empty."""
    *before, last = chat or [ChatMessage(role="user", content="")]
    if last.role != "user":
        return (*chat, ChatMessage(role="user", content=PLACE)), ""
    opening = BLANK_LINE if last.content else ""
    return (*before, msgspec.structs.replace(last, content=last.content + opening + PLACE)), opening


def cut_at_place(rendered: str, opening: str, thinking: ThinkingFormat | None) -> tuple[str, Surroundings]:
    """(state, surroundings of a question) of a chat that was rendered with `PLACE` in it.

    The closing begins an assistant turn without thoughts.
    """
    if rendered.count(PLACE) != 1:
        raise InvalidRequest(
            "The model's chat template does not write the last user turn exactly once.",
            field="messages",
            remedy="Send a plain prompt instead.",
        )
    state, _, closing = rendered.partition(PLACE)
    return state.removesuffix(opening), Surroundings(opening, _without_thoughts(closing, thinking))


def _without_thoughts(closing: str, thinking: ThinkingFormat | None) -> str:
    if thinking is None:
        return closing
    ends = (thinking.off, thinking.off.removesuffix(thinking.gap), thinking.on, thinking.default)
    longest = max((end for end in ends if closing.endswith(end)), key=len, default="")
    return closing.removesuffix(longest) + thinking.off


class DecisionTokenizer:
    """Writes questions in their layouts, and tokenises them.

    Parameters
    ----------
    encode_all
        The tokenizer's function for many texts.
    marked
        Function that marks special tokens that a text spells (`MessageTexts`).
    trained
        The layout that the checkpoint was trained with; None if it has none.
    """

    def __init__(
        self,
        encode_all: EncodeAll,
        marked: Callable[[str], str] = str,
        trained: Layout | None = None,
    ) -> None:
        self._encode_all = encode_all
        self._marked = marked
        self._trained = trained

    def layout(self, decide: Decide) -> Layout | None:
        """The layout of all questions; None if one is chosen for each. Raises `UnsupportedField` for
        "trained" if the checkpoint has no layout."""
        if decide.layout in LAYOUTS:
            return LAYOUTS[decide.layout]
        if decide.layout == "trained" and self._trained is None:
            raise UnsupportedField(
                "No layout is known that this checkpoint was trained with.",
                field="decide.layout",
                remedy="Use auto.",
            )
        return self._trained

    def tokens(self, decide: Decide, around: Surroundings) -> DecisionTokens:
        """The tokens of the questions of `decide`.

        Raises `InvalidRequest` for options without tokens or with equal tokens, and for questions that are
        too long together.
        """
        named = self.layout(decide)
        layouts = [named or LAYOUTS["verbatim"]] * len(decide.questions)
        forms = _written(layouts, decide)
        paths: Paths = {}
        self._add_paths(paths, forms, around.closing)
        if named is None:
            layouts = [LAYOUTS["labels" if _needs_labels(one[0], paths) else "verbatim"] for one in forms]
            forms = _written(layouts, decide)
            self._add_paths(paths, forms, around.closing)
        bodies = iter(self._bodies([form for one in forms for form in one], around))
        questions = []
        for index, (layout, one) in enumerate(zip(layouts, forms, strict=True)):
            place = f"decide.questions[{index}]"
            tokenised = [_tokenised(form, next(bodies), paths, place) for form in one]
            questions.append(WrittenQuestion(layout=layout.name, forms=tuple(tokenised)))
        return DecisionTokens(questions=tuple(questions), end=decide.end, prompt_ids=decide.prompt_ids)

    def _add_paths(self, paths: Paths, written: Iterable[Sequence[Form]], closing: str) -> None:
        """Add the ids of each spelling that is a text: those that the text adds to the ids of `closing`."""
        texts = {
            each.text
            for forms in written
            for form in forms
            for each in form.spellings
            if isinstance(each.text, str) and each.text not in paths
        }
        if not texts:
            return
        marked = {text: self._marked(text) for text in sorted(texts)}
        gap = " " if closing.endswith(":") else ""
        tail = _LAST_WORD.findall(closing)[0]
        before, *joint = map(
            tuple, self._encode_all([tail, *[tail + gap + text for text in marked.values()]])
        )
        apart = []
        for text, ids in zip(marked, joint, strict=True):
            paths[text] = ids[len(before) :]
            if ids[: len(before)] != before:  # the text changes tokens of the closing
                apart.append(text)
        for text, ids in zip(apart, self._encode_all([gap + marked[text] for text in apart]), strict=True):
            paths[text] = tuple(ids)

    def _bodies(self, forms: Sequence[Form], around: Surroundings) -> list[tuple[int, ...]]:
        """The ids of each form."""
        parts = [
            list(_joined((around.opening, *map(self._safe, form.body), around.closing))) for form in forms
        ]
        texts = dict.fromkeys(part for one in parts for part in one if isinstance(part, str))
        ids = dict(zip(texts, self._encode_all(list(texts)), strict=True))
        return [
            tuple([token for part in one for token in (ids[part] if isinstance(part, str) else part)])
            for one in parts
        ]

    def _safe(self, part: Segment) -> Segment:
        return self._marked(part) if isinstance(part, str) else part


def _written(layouts: Sequence[Layout], decide: Decide) -> list[list[Form]]:
    """The forms of each question. Raises `InvalidRequest` if they are too long together."""
    written, size = [], 0
    for layout, question in zip(layouts, decide.questions, strict=True):
        forms = layout.forms(question, decide.permutations)
        size += sum(len(part) for form in forms for part in form.body)
        if size > MAX_FORM_CHARACTERS:
            raise InvalidRequest(
                f"The questions have more than {MAX_FORM_CHARACTERS} characters as they are written: once for"
                " each order of the options, and in the layout isolated once for each option.",
                field="decide.questions",
                remedy="Send several requests, or fewer permutations.",
            )
        written.append(forms)
    return written


def _joined(parts: Iterable[Segment]) -> Iterator[Segment]:
    """`parts` with neighbouring texts joined, and without empty ones."""
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        if text:
            yield text
        text = ""
        yield part
    if text:
        yield text


def _path(spelling: Spelling, paths: Paths) -> tuple[int, ...]:
    return paths[spelling.text] if isinstance(spelling.text, str) else spelling.text


def _needs_labels(form: Form, paths: Paths) -> bool:
    """Whether the layout "auto" writes the question with labels: an option has more than `MAX_AUTO_TOKENS` or
    none, or two options have the same tokens."""
    options = {_path(each, paths): each.option for each in form.spellings}
    lengths = [*map(len, options)]
    return (
        max(lengths) > MAX_AUTO_TOKENS
        or min(lengths) == 0
        or any(options[_path(each, paths)] != each.option for each in form.spellings)
    )


def _tokenised(form: Form, ids: tuple[int, ...], paths: Paths, field: str) -> DecisionForm:
    """Raises `InvalidRequest` for an option without tokens, and for two options with equal ones."""
    options: dict[tuple[int, ...], int] = {}
    for spelling in form.spellings:
        path = _path(spelling, paths)
        place = f"{field}.options[{spelling.option}].name"
        if not path:
            raise InvalidRequest("An option has no tokens.", field=place, remedy="Use the layout labels.")
        if options.setdefault(path, spelling.option) != spelling.option:
            raise InvalidRequest(
                f"The options {options[path]} and {spelling.option} have the same tokens.",
                field=place,
                remedy="Use the layout labels, or auto.",
            )
    return DecisionForm(ids=ids, paths=tuple(options), options=tuple(options.values()), about=form.about)
