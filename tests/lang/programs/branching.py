"""Programs that fork: a tree of thought, a judge of several dimensions, a skeleton, a speculative select."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

import ramify as rm
from tests.lang.programs.case import Case


@rm.function
def tree_of_thought(s: rm.ProgramState, problem: str, width: int = 2) -> str:
    s += rm.system("You solve problems in steps and check your work.") + rm.user(problem)
    plans = s.fork(width)
    solutions = []
    for index, plan in enumerate(plans):
        plan += rm.user(f"Give plan {index + 1} in one sentence.")
        plan += rm.assistant(rm.gen("plan", max_tokens=24, stop="\n", temperature=0.0))
        branches = plan.fork(width)
        for number, branch in enumerate(branches):
            branch += rm.user(f"Carry the plan out, way {number + 1}.")
            branch += rm.assistant(rm.gen("solution", max_tokens=24, temperature=0.0))
            branch += rm.user("How sure are you, from 1 to 9?")
            branch += rm.assistant(rm.gen("sure", regex="[1-9]", max_tokens=4, temperature=0.0))
        solutions += list(branches)
    best = max(solutions, key=lambda branch: int(branch["sure"]))
    answer: str = best["solution"]
    s += rm.assistant("After comparing: " + answer)
    return answer


TREE = Case(
    name="tree-of-thought",
    program=tree_of_thought,
    arguments=[
        {"problem": "Four people cross a bridge with one lamp in 1, 2, 5 and 10 minutes. How fast can they?"},
        {"problem": "Make 24 from the numbers 3, 3, 8 and 8."},
    ],
    varied="problem",
    script={"plan": "Try pairs.", "solution": "It takes 17.", "sure": "7"},
)


class Score(BaseModel):
    score: Annotated[int, Field(ge=1, le=5)]
    reason: Annotated[str, Field(max_length=40)]


DIMENSIONS = ("clarity", "originality", "evidence", "structure")

ESSAYS = [
    "Trams should be free. Fewer cars would stand in the streets, and nobody would need to queue at the "
    "machine. The town pays for roads too, and nobody sells tickets for them.",
    "Reading aloud is more than a way to fall asleep. A child who listens learns how sentences go on, and a "
    "grown-up who reads learns where they stop.",
]


@rm.function
def judge(s: rm.ProgramState, essay: str) -> float:
    s += rm.system("You judge essays, strictly but fairly.") + rm.user("Essay:\n" + essay)
    views = s.fork(len(DIMENSIONS))
    for view, dimension in zip(views, DIMENSIONS, strict=True):
        view += rm.user(f"Score its {dimension} from 1 to 5, with a reason.")
        view += rm.assistant(rm.gen("view", schema=Score, max_tokens=96, temperature=0.0))
    scores: list[Score] = views["view"]
    views.join()
    told = "; ".join(
        f"{name} {view.score}: {view.reason}" for name, view in zip(DIMENSIONS, scores, strict=True)
    )
    s += rm.user("The views were: " + told + ". Which grade?")
    s += rm.assistant(rm.select("grade", ["A", "B", "C", "D"]))
    return sum(view.score for view in scores) / len(scores)


JUDGE = Case(
    name="judge",
    program=judge,
    arguments=[{"essay": essay} for essay in ESSAYS],
    varied="essay",
    script={"view": '{"score": 4, "reason": "It says what it means."}', "grade": "B"},
)


@rm.function
def skeleton_of_thought(s: rm.ProgramState, question: str, points: int = 3) -> None:
    s += "Question: " + question + "\nThree points, a few words each:\n"
    for number in range(1, points + 1):
        s += f"{number}." + rm.gen(f"point {number}", max_tokens=10, stop=["\n", "."], temperature=0.0) + "\n"
    names = [s[f"point {number}"] for number in range(1, points + 1)]
    forks = s.fork(points)
    for fork, name in zip(forks, names, strict=True):
        fork += "\nMore about" + name + ":"
        fork += rm.gen("more", max_tokens=24, stop="\n\n", temperature=0.0)
    forks.join("concate_and_append")
    s += "\n\nIn short:" + rm.gen("short", max_tokens=16, stop="\n", temperature=0.0)


SKELETON = Case(
    name="skeleton-of-thought",
    program=skeleton_of_thought,
    arguments=[
        {"question": "How does one keep a bicycle in good shape?"},
        {"question": "What makes a good meeting?"},
        {"question": "Why do cities build bridges?"},
    ],
    varied="question",
    script={
        "point 1": " Oil it.",
        "point 2": " Keep it dry.",
        "point 3": " Check the brakes.",
        "more": " Do so every month.",
        "short": " Look after it.",
    },
)

REPLIES = {
    "refund": "Dear customer, we return the money for",
    "repair": "Dear customer, please send us",
    "question": "Dear customer, thank you for asking about",
}


@rm.function
def speculative_select(s: rm.ProgramState, mail: str) -> str:
    """All replies are generated while the select decides; the chosen one is appended."""
    s += "Mail to the shop:\n" + mail + "\n\n"
    drafts = s.fork(len(REPLIES))
    for draft, (kind, opening) in zip(drafts, REPLIES.items(), strict=True):
        draft += f"Kind of mail: {kind}\nReply: {opening}"
        draft += rm.gen("draft", max_tokens=20, stop="\n", temperature=0.0)
    s += "Kind of mail: " + rm.select("kind", list(REPLIES))
    chosen = drafts[list(REPLIES).index(s["kind"])]
    s += "\nReply: " + REPLIES[s["kind"]] + chosen["draft"] + "\n"
    s += "Urgent: " + rm.select("urgent", ["yes", "no"])
    return str(s["kind"])


SPECULATIVE = Case(
    name="speculative-select",
    program=speculative_select,
    arguments=[
        {"mail": "The kettle came with a dent. I would like my money back."},
        {"mail": "Does the blue lamp take ordinary bulbs?"},
        {"mail": "The hinge of the box broke yesterday. Can you mend it?"},
    ],
    varied="mail",
    script={"draft": " your order.", "kind": "repair", "urgent": "no"},
)
