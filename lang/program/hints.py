"""The hint that each request carries: its program and branch, and when the request's KV pages are needed
again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ramify.lang.prompt.transcript import place_of
from ramify.messages import NextUse, ProgramHint

if TYPE_CHECKING:
    from ramify.lang.calls.target import Target
    from ramify.lang.program.branch import Branch
    from ramify.lang.prompt.view import View
    from ramify.lang.trace.calls import Call

LEASE_S = 60.0
"""Length in seconds of the lease on the pages of a branch that may continue. The lease ends earlier if the
program ends."""


def hint_of(
    branch: Branch, call: Call, view: View[Target], opened: View[Target], next_use: NextUse | None
) -> ProgramHint:
    """The hint of the request of `call`.

    Args:
        view: The content before the request.
        opened: `view` after `open_answer`; the same as `view` if the request has no setting of thinking.
        next_use: The next use of the branch's pages, if the step knows it; None to derive it from the queue.
    """
    run, target = branch.run, view.target
    if branch.is_last_step:
        next_use = "never"
    elif next_use is None:
        next_use = "soon" if branch.returns_to(target) else "unknown"
    return ProgramHint(
        program=run.program,
        name=run.root.call.name,
        lease_s=0.0 if next_use == "never" and not branch.forks else LEASE_S,
        path=call.path,
        next_use=next_use,
        branch=branch.key,
        forks=branch.forks,
        ended=run.take_ended(target),
        parts=_parts(branch, view, opened),
        calls_left=run.queued_calls(target) if run.body_done.is_set() else None,
        limits=tuple([limit.hint(target.backend) for limit in branch.limits]),
    )


def _parts(branch: Branch, view: View[Target], opened: View[Target]) -> tuple[tuple[int, int], ...]:
    """The places in the prompt after which later prompts of the program may differ from it.

    One place is the fork of the branch. Only the first request of the branch tells it. The other is the
    beginning of the thoughts, which are removed from later prompts.
    """
    target, found = view.target, []
    if target is not branch.run.home or target.takes_messages:
        return ()
    if branch.fork_point is not None and not branch.fork_told:
        branch.fork_told = True
        found.append(place_of(branch.fork_point, view.prompt))
    if opened.tail is not view.tail:
        found.append(place_of(view.tail, view.prompt))
    return tuple(found)
