"""The pushdown engine where the items of an array must differ (``uniqueItems``, `rules.expression.Fresh`).

The automaton's mask is what would be allowed if no item had been read yet. Few of its tokens can repeat an
item or lead to where only repetitions are left: those that end or begin an item, and those that go on as an
earlier item does. Each of these is tried out, byte by byte.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ramify.grammar.automaton.pushdown import UniqueItems
from ramify.grammar.automaton.unique_items import ENDLESS_WORDS, surcharge
from ramify.grammar.engine.pushdown import FINISHED, PushdownGrammar
from ramify.grammar.engine.stack import Entry
from ramify.grammar.matcher import first_token, taken_back

Used = frozenset[bytes]
NOTHING_USED: Used = frozenset()


class _Entry(Entry):
    """`used`: the texts that were used in the rule that is returned to."""

    __slots__ = ("used",)

    def __init__(self, state: int, parent: Entry | None, grammar: PushdownGrammar, used: Used) -> None:
        super().__init__(state, parent, grammar.lists)
        self.used = used


class _Item(NamedTuple):
    """The fresh text that is being read: `said` so far, and the used texts that begin like it."""

    said: bytes
    alike: tuple[bytes, ...]

    def after(self, data: bytes) -> _Item:
        said = self.said + data
        return _Item(said, tuple(text for text in self.alike if text.startswith(said)))


class _Step(NamedTuple):
    """`used`: the texts that were used in the rule that is being read."""

    state: int
    stack: _Entry | None
    used: Used
    item: _Item | None
    before: _Step | None
    accepted: int


class UniqueItemsMatcher:
    """A matcher that remembers the items it has read."""

    free = False

    def __init__(self, grammar: PushdownGrammar, items: UniqueItems, step: _Step) -> None:
        self._grammar = grammar
        self._items = items
        self._after_item: list[bool] = grammar.automaton.after_item.tolist()
        self._step = step

    @staticmethod
    def begin(grammar: PushdownGrammar, items: UniqueItems) -> UniqueItemsMatcher:
        return UniqueItemsMatcher(grammar, items, _Step(0, None, NOTHING_USED, None, None, 0))

    # --- moving -----------------------------------------------------------------------------------------

    def accept(self, token: int) -> bool:
        vocabulary = self._grammar.vocabulary
        if self.finished or not 0 <= token < vocabulary.size:
            return False
        if vocabulary.tokens[token]:
            return self.accept_bytes(vocabulary.tokens[token])
        if not self.complete or token not in vocabulary.stop_ids:
            return False
        step = self._step
        self._step = _Step(FINISHED, None, NOTHING_USED, None, step, step.accepted + 1)
        return True

    def accept_bytes(self, data: bytes) -> bool:
        after = None if self.finished else self._after(self._step, data)
        if after is None:
            return False
        self._step = after._replace(before=self._step, accepted=self._step.accepted + 1)
        return True

    def _after(self, step: _Step, data: bytes) -> _Step | None:
        """The configuration after `data`; None where the grammar does not allow it, or no end is left."""
        here: _Step | None = step
        for i in range(len(data)):
            here = None if here is None else self._read(here, data[i : i + 1])
        exit_states = self._grammar.lists.exit
        while here is not None and here.stack is not None and exit_states[here.state]:
            here = self._returned(here)
        return here if here is not None and self._can_end(here) else None

    def _read(self, step: _Step, byte: bytes) -> _Step | None:
        grammar = self._grammar
        state, stack, used, item = step[:4]
        while True:
            edge = grammar.lists.edge(state, byte[0])
            if edge is None:
                back = self._returned(_Step(state, stack, used, item, None, 0))
                if back is None:
                    return None
                state, stack, used, item = back[:4]
                continue
            target, push = edge
            if push >= 0:
                stack = _Entry(push, stack, grammar, used)
                if self._after_item[push]:
                    item = _Item(b"", tuple(used))
            if target >= 0:
                return _Step(target, stack, used, item and item.after(byte), None, 0)
            state, used = ~target, NOTHING_USED

    def _reads(self, step: _Step, byte: bytes) -> list[_Step]:
        after = self._read(step, byte)
        return [] if after is None else [after]

    def _returned(self, step: _Step) -> _Step | None:
        """Where what is being read ends here, the configuration after it."""
        stack = step.stack
        if stack is None or not self._grammar.lists.final[step.state]:
            return None
        used, item = stack.used, step.item
        if self._after_item[stack.state]:
            assert item is not None
            if item.said in used:
                return None
            used, item = used | {item.said}, None
        parent = stack.parent
        assert parent is None or isinstance(parent, _Entry)
        return _Step(stack.state, parent, used, item, None, 0)

    # --- what is left -----------------------------------------------------------------------------------

    def _holders(self, step: _Step) -> list[tuple[int, int]]:
        """(state, number of used texts) for each rule that may still read fresh texts; the one that is
        being read in one of them counts as used."""
        found = [(step.state, len(step.used))]
        entry = step.stack
        while entry is not None:
            assert isinstance(entry, _Entry)
            found.append((entry.state, len(entry.used) + self._after_item[entry.state]))
            entry = entry.parent  # type: ignore[assignment]
        return [(state, used) for state, used in found if self._items.item[state] >= 0]

    def _can_end(self, step: _Step) -> bool:
        items = self._items
        for state, used in self._holders(step):
            if items.words[items.item[state]] - used < items.need[state]:
                return False
        if step.item is None or not step.item.alike:
            return True
        texts = items.words[step.state]
        for state in self._above_item(step):
            texts *= items.words[state]
        return texts > len(step.item.alike) or texts >= ENDLESS_WORDS

    def _above_item(self, step: _Step) -> list[int]:
        """The states to return to before the fresh text has ended."""
        states: list[int] = []
        entry: Entry | None = step.stack
        while entry is not None and not self._after_item[entry.state]:
            states.append(entry.state)
            entry = entry.parent
        return states

    def _cost(self, step: _Step) -> int:
        return self._plain_cost(step) + self._surcharge(step)

    def _plain_cost(self, step: _Step) -> int:
        return self._grammar.lists.cost[step.state] + (step.stack.cost if step.stack else 0)

    def _surcharge(self, step: _Step) -> int:
        items = self._items
        found = sum(
            surcharge(items.lengths[items.item[state]], used, items.need[state])
            for state, used in self._holders(step)
        )
        if step.item is not None and step.item.alike:
            found += self._other_end(step) - self._cost_of_item(step)
        return found

    def _cost_of_item(self, step: _Step) -> int:
        cost = self._grammar.lists.cost
        return cost[step.state] + sum(cost[state] for state in self._above_item(step))

    def _other_end(self, step: _Step) -> int:
        """Tokens that suffice to end the fresh text as one that was not used: bytes up to where it leaves
        the used ones, and then the cost from there on."""
        assert step.item is not None
        least = ENDLESS_WORDS
        queue = [(step, 0)]
        while queue:
            here, read = queue.pop()
            assert here.item is not None
            if self._item_may_end(here) and here.item.said not in here.item.alike:
                least = min(least, read)
            length = len(here.item.said)
            ahead = {text[length] for text in here.item.alike if len(text) > length}
            for byte in self._bytes_to_try(here, ahead):
                for after in self._reads(here, bytes([byte])):
                    if after.item is None or read + 1 >= least:
                        continue
                    if after.item.alike:
                        queue.append((after, read + 1))
                    else:
                        least = min(least, read + 1 + self._cost_of_item(after))
        return least

    def _item_may_end(self, step: _Step) -> bool:
        final = self._grammar.lists.final
        return final[step.state] and all(final[state] for state in self._above_item(step))

    def _bytes_to_try(self, step: _Step, ahead: set[int]) -> list[int]:
        """`ahead`, and for each range of bytes that may come in the fresh text one that is not among them."""
        lists = self._grammar.lists
        found = list(ahead)
        for state in [step.state, *self._above_item(step)]:
            low, high, _, _ = lists.edges(state)
            for first, last in zip(low, high, strict=True):
                found += [byte for byte in range(first, last + 1) if byte not in ahead][:1]
            if not lists.final[state]:
                break
        return found

    # --- what may come ----------------------------------------------------------------------------------

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        if self.finished:
            row[:] = 0
            return True
        self._fill(self._step, row, budget)
        if self.complete:
            row |= self._grammar.stop_bits
        return True

    def _fill(self, step: _Step, row: np.ndarray, budget: int | None) -> None:
        grammar = self._grammar
        mask = grammar.mask(step.state, step.stack)
        np.copyto(row, mask.row)
        if budget is not None:
            after_others = self._surcharge(step._replace(item=None))
            if self._plain_cost(step) + mask.rise + after_others >= budget:
                left = budget - 1 - after_others - (step.stack.cost if step.stack else 0)
                grammar.walk(step.state, step.stack, row, limit=left)
        bits, allowed = row.view(np.uint32), mask.row.view(np.uint32)
        for token in (*mask.doubtful, *self._alike_tokens(step)):
            word, bit = token >> 5, np.uint32(1 << (token & 31))
            if not allowed[word] & bit:
                continue
            afters = self._afters(step, grammar.vocabulary.tokens[token])
            if any(budget is None or self._cost(after) < budget for after in afters):
                bits[word] |= bit
            else:
                bits[word] &= ~bit

    def _afters(self, step: _Step, data: bytes) -> list[_Step]:
        """The configurations after `data` from which the text can be completed."""
        after = self._after(step, data)
        return [] if after is None else [after]

    def _alike_tokens(self, step: _Step) -> list[int]:
        """The tokens that used texts go on with from where the item stands."""
        if step.item is None:
            return []
        ids = self._grammar.trie.ids_of
        length = len(step.item.said)
        pieces = {text[length:end] for text in step.item.alike for end in range(length + 1, len(text) + 1)}
        return [token for piece in pieces for token in ids.get(piece, ())]

    def forced_bytes(self) -> bytes:
        return b"" if self.finished else self._grammar.forced(self._step.state, self._step.stack)

    @property
    def completion_tokens(self) -> int | None:
        if self.finished or self.complete:
            return 0
        return self._cost(self._step)

    def completion(self) -> list[int] | None:
        twin = self.fork()
        tokens: list[int] = []
        row = np.empty_like(self._grammar.stop_bits)
        while not twin.complete:
            twin.fill_mask(row, twin.completion_tokens)
            best = int(self._grammar.automaton.token[twin._step.state])
            has_best = best >= 0 and bool(row.view(np.uint32)[best >> 5] >> np.uint32(best & 31) & 1)
            if not has_best:
                best = first_token(row)
            tokens.append(best)
            assert twin.accept(best)
        return tokens

    # --- steps ------------------------------------------------------------------------------------------

    def rollback(self, count: int) -> None:
        self._step = taken_back(self._step, count)

    def fork(self) -> UniqueItemsMatcher:
        return UniqueItemsMatcher(self._grammar, self._items, self._step)

    @property
    def finished(self) -> bool:
        return self._step.state == FINISHED

    @property
    def complete(self) -> bool:
        return self.finished or self._may_end(self._step)

    def _may_end(self, step: _Step) -> bool:
        here: _Step | None = step
        while here is not None and here.stack is not None:
            here = self._returned(here)
        return here is not None and self._grammar.lists.final[here.state]
