"""The matcher for rules that remember the text read in them: unique items, or the members of an object.

Each open object whose members come in any order has a register (`engine.members`). Masks are computed with
these registers.

For arrays with ``uniqueItems``, the automaton's mask ignores the items read so far. Few tokens of this mask
can repeat an item, or lead to a state from which only repetitions are possible: the tokens that begin or end
an item, and the tokens that continue the item in the same way as an earlier item. Each of these tokens is
tried byte by byte. With strings of the letters a and b, after ``["a", "``:

    allowed by the automaton    a    b    aa    a"    b"
    tried                       a                a"    b"
    allowed                     a    b    aa          b"

The token a" would repeat the first item. After the token a, the item can still become "aa".

The automaton may be nondeterministic: each configuration then has its own items and registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ramify.grammar.automaton.pushdown import ENDLESS_WORDS, UniqueItems, surcharge
from ramify.grammar.engine.configurations import BranchingMatcher, Step
from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.grammar.engine.stack import NO_ITEMS, Entry, Memory, Register, UsedItems


class _Item(NamedTuple):
    """The unique item being read: its text so far, the used items that begin with that text (`alike`), and
    the unique item that contains it (`around`), None if there is none."""

    text: bytes
    alike: UsedItems
    around: _Item | None

    def after(self, data: bytes) -> _Item:
        text = self.text + data
        alike = frozenset(used for used in self.alike if used.startswith(text)) if self.alike else self.alike
        return _Item(text, alike, self.around and self.around.after(data))

    def levels(self) -> Iterator[_Item]:
        """This item, then the items that contain it, the innermost first."""
        item: _Item | None = self
        while item is not None:
            yield item
            item = item.around

    @property
    def any_alike(self) -> bool:
        return any(item.alike for item in self.levels())


class _Configuration(NamedTuple):
    """A way to read the text so far. `used` is the memory of the rule being read. Equal configurations allow
    the same continuations."""

    state: int
    stack: Entry | None
    used: Memory
    item: _Item | None


class RememberingMatcher(BranchingMatcher[_Configuration]):
    """A matcher for deterministic and nondeterministic automata with unique items or registers."""

    def __init__(self, grammar: PushdownGrammar, step: Step[_Configuration]) -> None:
        super().__init__(grammar, step)
        items = grammar.automaton.items
        self._items = UniqueItems([], [-1] * grammar.automaton.states, [], {}) if items is None else items
        self._members = grammar.members

    @classmethod
    def at_beginning(cls, grammar: PushdownGrammar) -> RememberingMatcher:
        begun = NO_ITEMS if grammar.members is None else grammar.members.begun(0)
        return cls.starting(grammar, _Configuration(0, None, begun, None))

    # --- moving -----------------------------------------------------------------------------------------

    def _after(self, configurations: tuple[_Configuration, ...], data: bytes) -> tuple[_Configuration, ...]:
        """The configurations after `data` from which the text can be completed."""
        exits = self._grammar.lists.exit
        found: dict[_Configuration, None] = {}
        for read in super()._after(configurations, data):
            after: _Configuration | None = read
            while after is not None and after.stack is not None and exits[after.state]:
                after = self._returned(after)
            if after is not None and self._can_end(after):
                found[after] = None
        return tuple(found)

    def _stepped(
        self, configuration: _Configuration, target: int, push: int, byte: int
    ) -> _Configuration | None:
        _, stack, used, item = configuration
        if push >= 0:
            own = None
            if isinstance(used, Register):
                assert self._members is not None
                own = self._members.left(push, used)
                if own is None:
                    return None
            elif self._grammar.lists.after_item[push]:
                item = _Item(b"", used, item)
            stack = self._grammar.stacks.pushed(push, stack, used, own)
            used = NO_ITEMS
        if target < 0:
            begun = NO_ITEMS if self._members is None else self._members.begun(~target)
            return _Configuration(~target, stack, begun, item)
        if isinstance(used, Register):
            assert self._members is not None
            after = self._members.entered(target, used)
            if after is None:
                return None
            used = after
        return _Configuration(target, stack, used, item and item.after(bytes([byte])))

    def _returned(self, configuration: _Configuration) -> _Configuration | None:
        """The configuration after a return; None if the rule cannot end here, or if the item that ends here
        was used before."""
        stack = configuration.stack
        if stack is None or not self._grammar.lists.final[configuration.state]:
            return None
        used, item = stack.used, configuration.item
        if self._grammar.lists.after_item[stack.state]:
            assert item is not None
            assert not isinstance(used, Register)
            if item.text in used:
                return None
            used, item = used | {item.text}, item.around
        return _Configuration(stack.state, stack.parent, used, item)

    # --- what is left -----------------------------------------------------------------------------------

    def _open_arrays(self, configuration: _Configuration) -> list[tuple[int, int, bool]]:
        """Each array rule that may still read unique items: (its state, its number of used items, whether it
        is inside a unique item). An item that is being read counts as used."""
        if self._grammar.automaton.items is None:
            return []
        after_item = self._grammar.lists.after_item
        left = 0 if configuration.item is None else sum(1 for _ in configuration.item.levels())
        found = [(configuration.state, len(configuration.used), left > 0)]
        entry = configuration.stack
        while entry is not None:
            left -= after_item[entry.state]
            found.append((entry.state, len(entry.used) + after_item[entry.state], left > 0))
            entry = entry.parent
        return [(state, used, within) for state, used, within in found if self._items.item[state] >= 0]

    def _can_end(self, configuration: _Configuration) -> bool:
        """Whether enough unused items are left for every open array, and the item being read can become an
        unused one."""
        if not self._arrays_can_end(configuration):
            return False
        item = configuration.item
        if item is None or not item.any_alike:
            return True
        if item.around is None:
            texts = 1
            for state in self._states_of_item(configuration):
                texts *= self._items.words[state]
            if texts > len(item.alike) or texts >= ENDLESS_WORDS:
                return True
        return self._cost_of_other_item(configuration) < ENDLESS_WORDS

    def _arrays_can_end(self, configuration: _Configuration) -> bool:
        items = self._items
        return all(
            items.words[items.item[state]] - used >= items.need[state]
            for state, used, _ in self._open_arrays(configuration)
        )

    def _states_of_item(self, configuration: _Configuration) -> list[int]:
        """The state, and the states on the stack that belong to the outermost unique item."""
        assert configuration.item is not None
        states = [configuration.state]
        inner = sum(1 for _ in configuration.item.levels()) - 1
        entry = configuration.stack
        while entry is not None:
            if self._grammar.lists.after_item[entry.state]:
                if not inner:
                    break
                inner -= 1
            states.append(entry.state)
            entry = entry.parent
        return states

    def _cost(self, configuration: _Configuration) -> int:
        state, stack, used, _ = configuration
        left = self._grammar.lists.cost[state]
        if isinstance(used, Register):
            assert self._members is not None
            ways = self._members.left(state, used)
            assert ways is not None
            left = ways
        return left + (stack.cost if stack else 0) + self._surcharge(configuration)

    def _surcharge(self, configuration: _Configuration) -> int:
        """Number of tokens of a completion beyond its cost by the automaton. That cost ignores the used
        items."""
        if configuration.item is None or not configuration.item.any_alike:
            return self._surcharge_of_arrays(configuration)
        other = self._cost_of_other_item(configuration) - self._cost_of_item(configuration)
        return self._surcharge_of_arrays(configuration, within=False) + other

    def _surcharge_of_arrays(self, configuration: _Configuration, within: bool | None = None) -> int:
        """Number of tokens that open arrays add: those inside a unique item if `within` is True, the others
        if it is False, all if it is None."""
        items = self._items
        return sum(
            surcharge(items.lengths[items.item[state]], used, items.need[state])
            for state, used, inside in self._open_arrays(configuration)
            if within in (None, inside)
        )

    def _cost_of_item(self, configuration: _Configuration) -> int:
        cost = self._grammar.lists.cost
        return sum(cost[state] for state in self._states_of_item(configuration))

    def _cost_of_other_item(self, configuration: _Configuration) -> int:
        """Upper bound of the tokens that complete the item, and each item around it, to items that are not
        used yet. Counts one token for each byte until the items differ from all used items, and from there on
        the cost by the automaton."""
        least = ENDLESS_WORDS
        queue = [(configuration, 0)]
        while queue:
            here, read = queue.pop()
            assert here.item is not None
            if self._item_may_end(here):
                least = min(least, read)
            length = [len(item.text) for item in here.item.levels()]
            ahead = {
                text[end]
                for item, end in zip(here.item.levels(), length, strict=True)
                for text in item.alike
                if len(text) > end
            }
            for byte in self._bytes_to_try(here, ahead):
                for after in self._after_byte([here], byte):
                    if after.item is None or read + 1 >= least or not self._arrays_can_end(after):
                        continue
                    if after.item.any_alike:
                        queue.append((after, read + 1))
                    else:
                        left = self._cost_of_item(after) + self._surcharge_of_arrays(after, within=True)
                        least = min(least, read + 1 + left)
        return least

    def _item_may_end(self, configuration: _Configuration) -> bool:
        """Whether the item, and each item around it, may end here and is not used yet."""
        assert configuration.item is not None
        return all(self._grammar.lists.final[state] for state in self._states_of_item(configuration)) and all(
            item.text not in item.alike for item in configuration.item.levels()
        )

    def _bytes_to_try(self, configuration: _Configuration, ahead: set[int]) -> list[int]:
        """Bytes to try next: those in `ahead`, and one other byte of each range of bytes that may continue
        the item."""
        lists = self._grammar.lists
        found = list(ahead)
        for state in self._states_of_item(configuration):
            low, high, _, _ = lists.edges(state)
            for first, last in zip(low, high, strict=True):
                found += [byte for byte in range(first, last + 1) if byte not in ahead][:1]
            if not lists.final[state]:
                break
        return found

    # --- masks ------------------------------------------------------------------------------------------

    def _fill(self, configuration: _Configuration, row: np.ndarray, budget: int | None) -> None:
        grammar = self._grammar
        state, stack, used, item = configuration
        of_arrays = 0 if budget is None else self._surcharge(configuration._replace(item=None))
        mask = grammar.fill(state, stack, row, budget, of_arrays, used)
        bits, allowed = row.view(np.uint32), mask.row.view(np.uint32)
        for token in (*mask.doubtful, *self._alike_tokens(item)):
            word, bit = token >> 5, np.uint32(1 << (token & 31))
            if not allowed[word] & bit:
                continue
            afters = self._after((configuration,), grammar.vocabulary.tokens[token])
            if any(budget is None or self._cost(after) < budget for after in afters):
                bits[word] |= bit
            else:
                bits[word] &= ~bit

    def allow_beyond(self, prefix: bytes, row: np.ndarray, budget: int | None) -> bool:
        if self._grammar.automaton.items is not None:
            return False
        own = np.empty_like(row)
        for state, stack, used, _ in self._step.configurations:
            self._grammar.fill_beyond(prefix, state, stack, own, budget, used)
            row |= own
        return True

    def _alike_tokens(self, item: _Item | None) -> list[int]:
        """The tokens that continue `item`, or an item around it, in the same way as a used item."""
        if item is None:
            return []
        ids = self._grammar.trie.ids_of
        pieces = {
            text[len(level.text) : end]
            for level in item.levels()
            for text in level.alike
            for end in range(len(level.text) + 1, len(text) + 1)
        }
        return [token for piece in pieces for token in ids.get(piece, ())]

    def forced_bytes(self) -> bytes:
        configurations = self._step.configurations
        if self._members is None and not self._grammar.automaton.nondeterministic and configurations:
            return self._grammar.forced(*configurations[0][:2])
        return super().forced_bytes()

    def _may_end(self, configuration: _Configuration) -> bool:
        here: _Configuration | None = configuration
        while here is not None and here.stack is not None:
            here = self._returned(here)
        return here is not None and self._grammar.lists.final[here.state]
