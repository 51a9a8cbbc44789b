"""The branches of one fork as a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ramify.lang.program.branch import Branch
from ramify.lang.program.nodes import Node, VariableStep

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from ramify.lang.state.state import ProgramState


T = TypeVar("T")


class ForkGroup:
    """The result of `fork`: a sequence of states. ``group[name]`` is the list of the values that the variable
    `name` has in the branches. `name` may be the variable's step."""

    def __init__(self, states: Sequence[ProgramState], parent: Branch) -> None:
        self.states = list(states)
        self._parent = parent

    def join(self, mode: str = "gather_variable") -> None:
        """Close the branches and return at once.

        ``gather_variable``: for each variable that the branches have set, the state that was forked gets a
        variable of the same name, whose value is the list of the branches' values. ``concate_and_append``:
        the content that each branch has added is appended to the state that was forked, in the order of the
        branches.
        """
        branches = [state._branch for state in self.states]
        if mode == "gather_variable":
            self._parent.gather(branches)
        elif mode == "concate_and_append":
            self._parent.splice(branches)
        else:
            raise ValueError(f"join mode is {mode!r}; it must be 'gather_variable' or 'concate_and_append'.")

    async def wait(self) -> None:
        """Wait for all steps that the branches have so far."""
        for state in self.states:
            await state.wait()

    @overload
    async def aget(self, name: str | VariableStep, kind: TypeForm[T]) -> list[T]: ...
    @overload
    async def aget(self, name: VariableStep[T]) -> list[T]: ...
    @overload
    async def aget(self, name: str | VariableStep, kind: Any = None) -> list[Any]: ...
    async def aget(self, name: str | VariableStep, kind: Any = None) -> list[Any]:
        """The list of the variable's values over the branches, for async programs."""
        return [await state.aget(name, kind) for state in self.states]

    @overload
    def __getitem__(self, key: int) -> ProgramState: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    @overload
    def __getitem__(self, key: VariableStep[T]) -> list[T]: ...
    def __getitem__(self, key: int | str | VariableStep) -> ProgramState | list[Any]:
        """The branch at an index, or the list of a variable's values over all branches."""
        if isinstance(key, str | Node):
            return [state[key] for state in self.states]
        return self.states[key]

    def __setitem__(self, key: int, value: ProgramState) -> None:
        # Python ends `group[i] += node` with this assignment.
        if self.states[key] is not value:
            raise TypeError("A branch cannot be replaced; append to it with +=.")

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)

    def __iadd__(self, item: str | Node | Sequence[str | Node] | Callable[[int], str | Node]) -> ForkGroup:
        """Append to each branch. `item` is a text or node for all branches, a sequence with one item for each
        branch, or a function from a branch's index to its item."""
        if isinstance(item, Node | str):
            items: Sequence[str | Node] = [item] * len(self.states)
        elif callable(item):
            items = [item(index) for index in range(len(self.states))]
        else:
            items = item
        if len(items) != len(self.states):
            raise ValueError(f"{len(items)} items for {len(self.states)} branches.")
        for state, one in zip(self.states, items, strict=True):
            state += one
        return self
