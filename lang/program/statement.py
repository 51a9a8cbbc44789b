"""Statements of a program's body: `recover` resets a branch to the content before the failed statement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ramify.lang.calls.limits import Limits
from ramify.lang.prompt.chat import Content
from ramify.lang.prompt.transcript import Piece

if TYPE_CHECKING:
    from ramify.lang.program.branch import Branch


class Statement:
    """The steps that are appended together, as by ``s += a + b`` or ``s.user(...)``, or all steps of a
    ``with`` block.

    with s.assistant():       a block
        s += "Plan: "         a statement in the block
        s += gen("plan")      a statement in the block, which fails
        s.recover()           in the block: the content before s += gen("plan")
    s.recover()               after the block: the content before the block
    """

    __slots__ = ("before", "limits", "open", "outer")

    def __init__(self, outer: Statement | None, limits: Limits, *, block: bool = False) -> None:
        self.outer = outer
        """The innermost block around the statement; None outside of blocks."""
        self.limits = limits
        self.open = block
        """Whether this is a block that the body has not left yet."""
        self.before: tuple[Content, dict[str, Piece | None], int] | None = None
        """The branch's content, its open scopes and its number of calls before the first step; None until
        that step runs."""

    def note_before(self, branch: Branch) -> None:
        """Keep the content of `branch` if no step of the statement has run. Called before each step. Also
        sets the branch's limits to those of the statement."""
        branch.limits = self.limits
        if self.before is None:
            self.before = (branch.content, dict(branch.scopes), len(branch.call.children))

    def closed(self) -> Statement:
        """The outermost block around this statement that the body has left; this statement if there is no
        such block."""
        found = self
        block = self.outer
        while block is not None:
            if not block.open:
                found = block
            block = block.outer
        return found
