"""Three views of one essay in parallel branches, each a typed verdict; then a grade.

python examples/judge.py
"""

from __future__ import annotations

import time
from typing import Annotated

from pydantic import BaseModel, Field

import ramify as rm

ESSAY = """\
Cities should plant more trees. On a hot day a street with trees is several degrees cooler than one
without, and people who can walk in the shade leave their cars at home. Trees also cost money: they
must be watered for years, and their roots lift the pavement. But so do air conditioners, every summer,
and nobody has ever rested under one.
"""


class Verdict(BaseModel):
    reason: Annotated[str, Field(max_length=120)]
    score: Annotated[int, Field(ge=1, le=5)]


@rm.function
def judge(s: rm.ProgramState, essay: str) -> None:
    s += rm.system("You grade essays.") + rm.user("Essay:\n" + essay)
    verdict = rm.gen("verdict", schema=Verdict, max_tokens=96, temperature=0.0)
    views = s.fork(3)
    for view, aspect in zip(views, ("clarity", "logic", "evidence"), strict=True):
        view += rm.user(f"Judge its {aspect}.")
        view += rm.assistant(verdict)
    worst = min(one.score for one in views[verdict])
    views.join()
    s += rm.user(f"The lowest score was {worst}. Grade the essay.")
    s += rm.assistant(rm.select("grade", choices=["A", "B", "C", "D"]))


def main(backend: rm.Backend | None = None) -> rm.ProgramState:
    started = time.perf_counter()
    backend = backend or rm.Engine().start()
    print(f"Engine ready in {time.perf_counter() - started:.1f} s.\n")

    state = judge.run(essay=ESSAY, backend=backend)
    for aspect, verdict in zip(("clarity", "logic", "evidence"), state["verdict"], strict=True):
        print(f"{aspect:9} {verdict.score}/5  {verdict.reason}")
    print(f"{'grade':9} {state['grade']}\n")

    print(state.trace)
    usage = state.usage
    print(
        f"\nprompt tokens: {state.trace.computed_tokens} computed, {usage.cached_tokens} cached; "
        f"output tokens: {usage.completion_tokens}, of which {usage.forced_tokens} forced; "
        f"{state.trace.requests} requests in {state.trace.duration_s:.2f} s"
    )
    return state


if __name__ == "__main__":
    main()
