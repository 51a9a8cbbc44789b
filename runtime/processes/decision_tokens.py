"""Tokenisation of questions behind a state.

    state                 <|im_start|>user\\nThe parcel is broken.
    opening               \\n\\n
    body of the form      Which team?\\n- billing\\n- returns\\nAnswer with exactly one of these options, …
    closing               <|im_end|>\\n<|im_start|>assistant\\n
    paths                 billing; returns

Opening, body and closing are tokenised as one text, apart from the state. So the state's ids are the same for
all questions. A path has the ids that its text adds behind the closing. All texts of a request are encoded
in batches, in slices of `SLICE_CHARACTERS`.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ramify.decisions.layouts import BLANK_LINE, LAYOUTS, Form, Layout, Spelling, order_count
from ramify.engine_messages import DecisionForm, DecisionTokens, WrittenQuestion
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatMessage, Segment
from ramify.model_info import ThinkingFormat
from ramify.questions import Decide, Option, Question

PLACE = f"\U0010fffd{secrets.token_hex(8)}\U0010fffd"
"""A text that holds the place of a question in a chat, or of a content in a trained layout, while the
template renders it. It is drawn at random, so that no message has it."""
MAX_AUTO_TOKENS = 8
"""Most tokens of an option that the layout "auto" writes verbatim."""
MAX_FORM_CHARACTERS = 8 << 20
"""Most characters of all forms of a request: they take the tokenizer a few seconds, in slices."""
SLICE_CHARACTERS = 128 << 10
"""Characters of questions that are written and tokenised before other prompts have a turn: about 0.1 s."""

MAX_KNOWN_IDS = 1_000_000
"""Most token ids of questions that are kept for later requests, about 36 bytes each."""

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


_Key = tuple[Layout | None, Question, int, Surroundings]
"""Layout, None if it is chosen; question; permutations; texts around it."""


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
        self._known: OrderedDict[_Key, WrittenQuestion] = OrderedDict()
        """Questions and their ids, least recently used first: the same are often asked of many states."""
        self._known_ids = 0

    def layout(self, decide: Decide) -> Layout | None:
        """The layout of all questions; None if one is chosen for each.

        "auto" takes no trained layout if the client has written the texts around the questions. Raises
        `UnsupportedField` for "trained" if the checkpoint has no layout, and for fields that a trained layout
        does not have.
        """
        if decide.layout in LAYOUTS:
            return LAYOUTS[decide.layout]
        surrounded = decide.opening is not None or decide.closing is not None
        if self._trained is None or (decide.layout == "auto" and surrounded):
            if decide.layout == "trained":
                raise UnsupportedField(
                    "No layout is known that this checkpoint was trained with.",
                    field="decide.layout",
                    remedy="Use auto.",
                )
            return None
        for field, given in (
            ("opening", decide.opening is not None),
            ("closing", decide.closing is not None),
            ("end", decide.end != "prefix"),
        ):
            if given:
                raise UnsupportedField(
                    f"{field} has no effect in the layout that this checkpoint was trained with.",
                    field=f"decide.{field}",
                    remedy="Leave it out, or name another layout.",
                )
        return self._trained

    def tokens(self, decide: Decide, around: Surroundings) -> Iterator[DecisionTokens | None]:
        """The tokens of the questions of `decide`, after a None between two slices of the work.

        Raises `InvalidRequest` for options without tokens or with equal tokens, and for questions that are
        too long together.
        """
        layout, known = self.layout(decide), self._known
        keys = [(layout, question, decide.permutations, around) for question in decide.questions]
        found: dict[_Key, WrittenQuestion] = {}
        places: dict[_Key, int] = {}
        for index, key in enumerate(keys):
            if key in known:
                known.move_to_end(key)
                found[key] = known[key]
            else:
                places.setdefault(key, index)
        room = MAX_FORM_CHARACTERS
        for start, part in enumerate(_slices(decide, places.values())):
            if start:
                yield None
            written, size = self._written(decide, layout, around, part, room)
            room -= size
            found |= zip([keys[index] for index in part], written, strict=True)
        for key in places:
            self._known_ids += 0 if key in known else _ids_of(found[key])
            known[key] = found[key]
        while self._known_ids > MAX_KNOWN_IDS:
            self._known_ids -= _ids_of(known.popitem(last=False)[1])
        questions = tuple([found[key] for key in keys])
        yield DecisionTokens(questions=questions, end=decide.end, prompt_ids=decide.prompt_ids)

    def _written(
        self,
        decide: Decide,
        layout: Layout | None,
        around: Surroundings,
        places: Sequence[int],
        room: int,
    ) -> tuple[list[WrittenQuestion], int]:
        """(questions of `decide` with the indices `places`, characters of their forms: at most `room`)."""
        questions = {index: self._safe(decide.questions[index]) for index in places}
        layouts = dict.fromkeys(questions, layout or LAYOUTS["verbatim"])
        forms = _forms(questions, layouts, decide.permutations, room)
        paths: Paths = {}
        self._add_paths(paths, forms.values(), around.closing)
        if layout is None:
            labelled = {
                index: one for index, one in questions.items() if _needs_labels(forms[index][0], paths)
            }
            layouts |= dict.fromkeys(labelled, LAYOUTS["labels"])
            forms |= _forms(labelled, layouts, decide.permutations, room)
            self._add_paths(paths, forms.values(), around.closing)
        bodies = iter(self._bodies([form for one in forms.values() for form in one], around))
        written = []
        for index, one in forms.items():
            place = f"decide.questions[{index}]"
            tokenised = [_tokenised(form, next(bodies), paths, place) for form in one]
            written.append(WrittenQuestion(layout=layouts[index].name, forms=tuple(tokenised)))
        return written, sum(_size(form) for one in forms.values() for form in one)

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
        stripped = closing.rstrip()
        tail = "".join(stripped.split()[-1:]) + closing[len(stripped) :]  # tokens span no earlier space
        before, *joint = self._encode_all([tail, *[tail + gap + text for text in marked.values()]])
        apart = []
        for text, ids in zip(marked, joint, strict=True):
            paths[text] = tuple(ids[len(before) :])
            if ids[: len(before)] != before:  # the text changes tokens of the closing
                apart.append(text)
        for text, ids in zip(apart, self._encode_all([gap + marked[text] for text in apart]), strict=True):
            paths[text] = tuple(ids)

    def _bodies(self, forms: Sequence[Form], around: Surroundings) -> list[tuple[int, ...]]:
        """The ids of each form."""
        parts = [list(_joined((around.opening, *form.body, around.closing))) for form in forms]
        texts = dict.fromkeys(part for one in parts for part in one if isinstance(part, str))
        ids = dict(zip(texts, self._encode_all(list(texts)), strict=True))
        return [
            tuple([token for part in one for token in (ids[part] if isinstance(part, str) else part)])
            for one in parts
        ]

    def _safe(self, question: Question) -> Question:
        """`question` with its texts marked. A layout's own texts may have control tokens."""
        options = tuple(
            [
                Option(name=self._marked(one.name), description=self._marked(one.description))
                for one in question.options
            ]
        )
        instructions = self._marked(question.instructions)
        return msgspec.structs.replace(question, instructions=instructions, options=options)


def _slices(decide: Decide, places: Iterable[int]) -> Iterator[list[int]]:
    """The indices `places` in slices of about `SLICE_CHARACTERS` of the questions' forms."""
    part: list[int] = []
    size = 0
    for index in places:
        question = decide.questions[index]
        texts = sum(len(option.name) + len(option.description) for option in question.options)
        count = order_count(question, decide.permutations)
        forms = len(question.options) if decide.layout == "isolated" else count
        size += texts * count + len(question.instructions) * forms
        part.append(index)
        if size >= SLICE_CHARACTERS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _size(form: Form) -> int:
    return sum(map(len, form.body))


def _forms(
    questions: Mapping[int, Question], layouts: Mapping[int, Layout], permutations: int, room: int
) -> dict[int, list[Form]]:
    """The forms of each question. Raises `InvalidRequest` if they have more than `room` characters."""
    found: dict[int, list[Form]] = {}
    size = 0
    for index, question in questions.items():
        forms = found[index] = []
        for form in layouts[index].forms(question, permutations):
            forms.append(form)
            size += _size(form)
            if size <= room:
                continue
            raise InvalidRequest(
                f"The questions have more than {MAX_FORM_CHARACTERS} characters as they are written: once for"
                " each order of the options, and in the layout isolated once for each option.",
                field="decide.questions",
                remedy="Send several requests, or fewer permutations.",
            )
    return found


def _ids_of(written: WrittenQuestion) -> int:
    return sum(len(form.ids) + sum(map(len, form.paths)) for form in written.forms)


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
