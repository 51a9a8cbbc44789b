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
from typing import NamedTuple

import numpy as np

from ramify.engine_messages import DecisionTokens, Submit
from ramify.errors import InvalidRequest
from ramify.questions import DecisionScores, FormScores, QuestionScores
from ramify.runtime.scheduler.requests.path_tree import Path, PathTree, Span

NO_PAGES = np.empty(0, np.int32)


class Form:
    """One form of a question, and its scores as far as they are known.

    question : the index of the question
    ids : (n,) int32, the tokens between the state and the paths
    """

    __slots__ = ("finished", "ids", "question", "tree", "values", "vocabulary")

    def __init__(self, question: int, ids: Path, tree: PathTree) -> None:
        self.question, self.tree, self.finished = question, tree, False
        least, greatest = tree.vocabulary
        self.vocabulary = min(least, *ids), max(greatest, *ids)
        """The least and the greatest token id of the form and its paths."""
        self.ids = np.array(ids, dtype=np.int32)
        self.values = np.zeros(tree.terms)
        """(terms,) float64, the terms of `PathTree`; unknown ones are 0."""

    @property
    def computed(self) -> int:
        """The number of tokens that are computed for the form."""
        return len(self.ids) + self.tree.computed

    @property
    def longest(self) -> int:
        """The number of tokens of the form and its longest path."""
        return len(self.ids) + self.tree.longest


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
        trees: dict[tuple[Path, ...], PathTree] = {}  # questions often have the same options
        last: Path = ()
        self.ids = submit.ids
        """The tokens that all forms follow: the state, but for its last token if a form has no tokens. The
        hidden state of that token is needed then, and the prefix tree keeps none."""
        if not all(form.ids for question in decide.questions for form in question.forms):
            self.ids, last = submit.ids[:-1], submit.ids[-1:]
        self.forms: list[Form] = []
        for number, question in enumerate(decide.questions):
            for form in question.forms:
                if not form.paths or not (last or form.ids):
                    raise InvalidRequest(
                        "The question has no options, or no tokens before them.",
                        field=f"decide.questions[{number}]",
                    )
                tree = trees.get(form.paths)
                if tree is None:
                    tree = trees[form.paths] = PathTree(form.paths, ends=bool(decide.ends))
                self.forms.append(Form(number, last + form.ids, tree))
        if not self.forms:
            raise InvalidRequest("There are no questions.", field="decide.questions")
        self.tokens = len(self.ids) + sum(form.computed for form in self.forms)
        """The number of tokens that are computed or found in the prefix tree."""
        self._longest = max(form.longest for form in self.forms)
        self.slots = max(form.tree.depth for form in self.forms)
        """The most slots for states that the branches of one form need, taken one after the other."""
        self.live: set[Branch] = set()
        """The branches that have pages."""
        self.reached = 0
        """The most tokens behind the state that have been computed."""
        self.restart()

    def restart(self) -> None:
        """Begin the forms that are not finished from their first tokens. No branch may have pages."""
        forms = [form for form in self.forms if not form.finished]
        self.pending = [self._branch(form, form.tree.root, None) for form in reversed(forms)]
        """The branches that are not computed, the next one last. That one may be computed in part."""
        self.unfinished = self.untaken = len(forms)
        """The numbers of forms that are not finished, and whose branch has no pages."""
        self._computed = sum(form.computed for form in self.forms if form.finished)

    def count(self, tokens: int) -> None:
        """Count `tokens` tokens behind the state that have been computed."""
        self._computed += tokens
        self.reached = max(self.reached, self._computed)

    def follow(self, branch: Branch) -> None:
        """Let the branches wait that follow `branch`, which is computed."""
        children = branch.span.children
        branch.untaken = branch.unfinished = len(children)
        self.pending += [self._branch(branch.form, span, branch) for span in reversed(children)]

    def most_pages(self, page_size: int) -> int:
        """The most pages of their own that the branches of one form need, taken one after the other."""
        state = len(self.ids)
        return -(-(state + self._longest) // page_size) - state // page_size + self.slots - 1

    def scores(self) -> DecisionScores:
        """The scores of all questions, which are finished."""
        found: list[list[FormScores]] = [[] for _ in self._decide.questions]
        written = (form for question in self._decide.questions for form in question.forms)
        for form, source in zip(self.forms, written, strict=True):
            found[form.question].append(
                FormScores(
                    options=source.options,
                    logprobs=form.tree.logprobs(form.values),
                    lengths=tuple(map(len, source.paths)),
                    about=source.about,
                    ids=source.ids if self._decide.prompt_ids else (),
                )
            )
        return DecisionScores(
            questions=tuple(
                QuestionScores(layout=question.layout, forms=tuple(forms))
                for question, forms in zip(self._decide.questions, found, strict=True)
            ),
            state_ids=self._state_ids if self._decide.prompt_ids else (),
        )

    def _branch(self, form: Form, span: Span, before: Branch | None) -> Branch:
        if before is None:
            start, ids = len(self.ids), np.concatenate([form.ids, span.tokens])
        else:
            start, ids = before.stop, span.tokens
        return Branch(form, span, before, ids, start, start)
