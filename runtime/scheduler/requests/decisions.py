"""The questions of one request: forms behind its prompt (the state), and the branches that compute them.

    state ─┬─ form 1 ─┬─ inner tokens of its paths
           │          └─ …
           ├─ form 2
           └─ …

A branch is no request: it has the pages of the tokens before it, a few pages of its own, and in models with
states a slot. It is never put into the prefix tree. Branches wait on a stack, so that those behind a computed
branch come before those of the next form, and pages in use stay few (`requests.branches`).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from ramify.engine_messages import DecisionForm, DecisionTokens, Submit
from ramify.errors import InvalidRequest
from ramify.questions import DecisionScores, FormScores, QuestionScores
from ramify.runtime.scheduler.requests.path_tree import Path, PathSet, Span

NO_PAGES = np.empty(0, np.int32)


class Form:
    """One form of a question, until it is finished.

    number : the index of the form
    question : the index of its question
    before : the token between the state and the form's own tokens, or none
    """

    __slots__ = ("before", "computed", "longest", "number", "paths", "question", "source", "values")

    def __init__(
        self, number: int, question: int, before: Path, source: DecisionForm, paths: PathSet
    ) -> None:
        self.number, self.question = number, question
        self.before, self.source, self.paths = before, source, paths
        self.computed = len(before) + len(source.ids) + paths.computed
        """The number of tokens that are computed for the form."""
        self.longest = len(before) + len(source.ids) + paths.longest
        """The number of tokens of the form and its longest path."""
        self.values: np.ndarray | None = None
        """(terms,) float64, the terms of `PathTree` while the form's branches are computed."""

    @property
    def vocabulary(self) -> tuple[int, int]:
        """The least and the greatest token id of the form and its paths."""
        least, greatest = self.paths.vocabulary
        ids = self.source.ids
        return min(least, min(ids, default=least)), max(greatest, max(ids, default=greatest))


@dataclasses.dataclass(slots=True, eq=False)
class Branch:
    """The tokens of one span: positions ``[start, stop)`` behind `before`."""

    form: Form
    span: Span
    before: Branch | None
    """The branch that this one goes on from; None for one that follows the state, and begins with the tokens
    of its form."""
    ids: np.ndarray
    """(stop - start,) int32."""
    start: int
    computed: int
    """The position up to which KV is computed."""
    table: np.ndarray = dataclasses.field(default_factory=lambda: NO_PAGES)
    """The page table, (slots,) int32; of no use before the branch has pages."""
    own: list[int] = dataclasses.field(default_factory=list)
    """The pages in `table` that are freed with the branch."""
    slot: int | None = None
    """The slot of the state after `computed` tokens, in models with states."""
    untaken: int = 0
    """The number of branches behind this one that have no pages yet."""
    unfinished: int = 0
    """The number of branches behind this one that are not finished."""

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


class Part(NamedTuple):
    """The part of a branch that one step computes: positions ``[start, stop)``.

    copy : (source, destination), a page to be copied before the pass; None if there is none
    """

    branch: Branch
    start: int
    stop: int
    copy: tuple[int, int] | None


class Decisions:
    """The forms of all questions of a request, and their branches.

    Raises `InvalidRequest` if there are no questions, for a form without paths, and for one without tokens
    behind an empty state.
    """

    def __init__(self, submit: Submit, decide: DecisionTokens) -> None:
        self._decide, self._state_ids = decide, submit.ids
        self.ends = decide.ends
        before: Path = ()
        self.ids = submit.ids
        """The tokens that all forms follow: the state, but for its last token if a form has no tokens. The
        hidden state of that token is needed then, and the prefix tree keeps none."""
        if not all(form.ids for question in decide.questions for form in question.forms):
            self.ids, before = submit.ids[:-1], submit.ids[-1:]
        self.forms: dict[int, Form] = {}
        """The forms that are not finished, by number."""
        sets: dict[frozenset[Path], PathSet] = {}  # questions often have the same options, in any order
        for index, question in enumerate(decide.questions):
            for form in question.forms:
                if not form.paths or not (before or form.ids):
                    raise InvalidRequest(
                        "The question has no options, or no tokens before them.",
                        field=f"decide.questions[{index}]",
                    )
                key = frozenset(form.paths)
                paths = sets.get(key)
                if paths is None:
                    paths = sets[key] = PathSet(key, ends=bool(decide.ends))
                number = len(self.forms)
                self.forms[number] = Form(number, index, before, form, paths)
        if not self.forms:
            raise InvalidRequest("There are no questions.", field="decide.questions")
        self.tokens = len(self.ids) + sum(form.computed for form in self.forms.values())
        """The number of tokens that are computed or found in the prefix tree."""
        self._longest = max(form.longest for form in self.forms.values())
        self.slots = max(paths.depth for paths in sets.values())
        """The most slots for states that the branches of one form need, taken one after the other."""
        self._scores: dict[int, FormScores] = {}
        """The scores of the finished forms, by number."""
        self.live: set[Branch] = set()
        """The branches that have pages."""
        self.reached = 0
        """The most tokens behind the state that have been computed."""
        self._finished_tokens = 0
        """The number of tokens of the forms that are finished."""
        self.restart()

    def restart(self) -> None:
        """Begin the forms that are not finished from their first tokens. No branch may have pages."""
        self._waiting = list(reversed(self.forms.values()))
        """The forms whose branches are not in `pending` yet, the next one last."""
        self.pending: list[Branch] = []
        """The branches that are not computed, the next one last. That one may be computed in part."""
        self.untaken = len(self._waiting)
        """The number of forms whose branch has no pages."""
        self._computed = self._finished_tokens

    def next_branch(self) -> Branch | None:
        """The branch that comes next; None if no branch waits. Forms begin one after the other, so that a
        step does the work for those that it computes."""
        if not self.pending and self._waiting:
            form = self._waiting.pop()
            form.values = np.zeros(form.paths.tree.terms)
            self.pending.append(self._branch(form, form.paths.tree.root, None))
        return self.pending[-1] if self.pending else None

    @property
    def left(self) -> int:
        """The number of tokens behind the state that have not been computed."""
        return self.tokens - len(self.ids) - self._computed

    def count(self, tokens: int) -> None:
        """Count `tokens` tokens behind the state that have been computed."""
        self._computed += tokens
        self.reached = max(self.reached, self._computed)

    def follow(self, branch: Branch) -> None:
        """Let the branches wait that follow `branch`, which is computed."""
        children = branch.span.children
        branch.untaken = branch.unfinished = len(children)
        self.pending += [self._branch(branch.form, span, branch) for span in reversed(children)]

    def finish(self, form: Form) -> None:
        """Record that all branches of `form` are computed and scored."""
        source, values = form.source, form.values
        assert values is not None
        self._scores[form.number] = FormScores(
            options=source.options,
            logprobs=form.paths.tree.logprobs(values, source.paths),
            lengths=tuple(map(len, source.paths)),
            about=source.about,
            ids=source.ids if self._decide.prompt_ids else (),
        )
        self._finished_tokens += form.computed
        del self.forms[form.number]

    def most_pages(self, page_size: int) -> int:
        """The most pages of their own that the branches of one form need, taken one after the other."""
        state = len(self.ids)
        return -(-(state + self._longest) // page_size) - state // page_size + self.slots - 1

    def scores(self) -> DecisionScores:
        """The scores of all questions, which are finished."""
        numbers = itertools.count()
        return DecisionScores(
            questions=tuple(
                QuestionScores(
                    layout=question.layout,
                    forms=tuple([self._scores[next(numbers)] for _ in question.forms]),
                )
                for question in self._decide.questions
            ),
            state_ids=self._state_ids if self._decide.prompt_ids else (),
        )

    def _branch(self, form: Form, span: Span, before: Branch | None) -> Branch:
        if before is None:
            own = np.array(form.before + form.source.ids, dtype=np.int32)
            start, ids = len(self.ids), np.concatenate([own, span.tokens])
        else:
            start, ids = before.stop, span.tokens
        return Branch(form, span, before, ids, start, start)
