"""A statement of a program's body: `recover` takes a branch back to before the one that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ramify.lang.calls.limits import Limits
from ramify.lang.prompt.chat import Dialogue
from ramify.lang.prompt.transcript import Piece

if TYPE_CHECKING:
    from ramify.lang.program.branch import Branch


class Content(NamedTuple):
    """The content of a branch between two steps."""

    tail: Piece | None
    dialogue: Dialogue
    scopes: dict[str, Piece | None]


class Statement:
    """The steps that are appended at once, as ``s += a + b`` and ``s.user(...)``, or a ``with`` block.

    with s.assistant():       a block
        s += "Plan: "         a statement in the block
        s += gen("plan")      fails; inside the block the branch goes back to here,
    s["plan"]                 and after it to before the block
    """

    __slots__ = ("before", "limits", "open", "outer")

    def __init__(self, outer: Statement | None, limits: Limits, *, block: bool = False) -> None:
        self.outer = outer
        """The block that the statement stands in."""
        self.limits = limits
        """The limits of the statement's steps."""
        self.open = block
        """Whether it is a block that the body has not left."""
        self.before: Content | None = None
        """The branch's content before the first step; None until that step runs."""

    def note_before(self, branch: Branch) -> None:
        """Called before each step: keep the branch's content before the first one."""
        branch.limits = self.limits
        if self.before is None:
            self.before = Content(branch.tail, branch.dialogue, dict(branch.scopes))

    def closed(self) -> Statement:
        """The outermost block around the statement that the body has left; without one, the statement."""
        found = self
        block = self.outer
        while block is not None:
            if not block.open:
                found = block
            block = block.outer
        return found
