"""An agent with three tools: the model calls them, sees what they return, and ends by calling the last.

Every call is held to the tools' schemas, so that even a small model makes no call that does not exist.

python examples/agent.py
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

import ramify as rm

HEIGHTS = {"Zugspitze": 2962, "Watzmann": 2713, "Feldberg": 1493}
"""In metres."""

Mountain = Literal["Zugspitze", "Watzmann", "Feldberg"]


@rm.tool
def height(mountain: Mountain) -> int:
    """Look up how high a mountain is, in metres."""
    return HEIGHTS[mountain]


@rm.tool
async def difference(higher: Mountain, lower: Mountain) -> int:
    """Compute how many metres higher one mountain is than another."""
    if HEIGHTS[higher] < HEIGHTS[lower]:
        raise ValueError(f"{higher} is lower than {lower}")
    return HEIGHTS[higher] - HEIGHTS[lower]


@rm.tool
def answer(text: Annotated[str, Field(min_length=1, max_length=40)]) -> str:
    """Give the final answer to the user."""
    return "The user has read it."


TOOLS = [height, difference, answer]
MAX_TURNS = 4


@rm.function
def agent(s: rm.ProgramState, question: str) -> str | None:
    s += rm.system("You answer questions about mountains by calling functions.", tools=TOOLS)
    s += rm.user(question)
    for turn in range(1, MAX_TURNS + 1):
        # It looks something up first, and in the end it has to answer.
        tools = TOOLS[:-1] if turn == 1 else TOOLS[-1:] if turn == MAX_TURNS else TOOLS
        for call in s.call_tools(tools, max_calls=2, max_tokens=96, temperature=0.0):
            if call.name == "answer" and call.error is None:
                return str(call.arguments["text"])
    return None


def main(backend: rm.Backend | None = None) -> rm.ProgramState:
    question = "Which is higher, the Zugspitze or the Watzmann, and by how much?"
    state = agent.run(question, backend=backend or rm.Engine(), stream=True)
    for event in state.events():
        match event:
            case rm.events.ToolCalled(name=name, arguments=arguments):
                print(f"{name}({arguments})")
            case rm.events.ToolReturned(name=name, shown=shown, seconds=seconds):
                print(f"  {name} -> {shown} ({seconds:.3f} s)")
            case rm.events.ToolFailed(name=name, error=error):
                print(f"  {name} failed: {error}")
    print(f"\nanswer: {state.ret_value}\n")
    print(state.trace)
    return state


if __name__ == "__main__":
    main()
