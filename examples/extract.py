"""Facts out of running text, as pydantic objects.

The output is held to the schema of the class, so it always parses.

python examples/extract.py
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

import ramify as rm

TEXT = """\
Hi, this is Maria Lopez. I ordered three lamps and one desk last Tuesday (order 48213), but only the
desk has come. Please tell me when the rest arrives, I need them for the opening on Friday!
"""


class Item(BaseModel):
    name: str = Field(max_length=30)
    quantity: int = Field(ge=1, le=99)


class Order(BaseModel):
    customer: str = Field(max_length=40)
    number: int = Field(ge=1, le=999_999)
    missing: list[Item] = Field(min_length=1, max_length=3)


@rm.function
def extract(s: rm.ProgramState, text: str) -> None:
    s += rm.system("You read mails to a shop and answer only with what is asked.")
    s += rm.user("Mail:\n" + text + "\nGive customer, order number and the missing items as JSON.")
    s += rm.assistant(rm.gen("order", schema=Order, max_tokens=128, temperature=0.0))
    s += rm.user("How urgent is it?")
    s += rm.assistant(rm.gen("urgency", schema=Literal["low", "medium", "high"], temperature=0.0))


def main(backend: rm.Backend | None = None) -> Order:
    state = extract.run(TEXT, backend=backend or rm.Engine())
    order = state.get("order", Order)
    print(f"order {order.number} of {order.customer}, urgency {state['urgency']}")
    for item in order.missing:
        print(f"  missing: {item.quantity} x {item.name}")
    return order


if __name__ == "__main__":
    main()
