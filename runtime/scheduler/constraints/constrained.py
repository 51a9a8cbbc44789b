"""One request's constrained output: its matcher, the mask that the sampler reads, and what is forced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ramify.errors import EngineError
from ramify.grammar.matcher import single_token

if TYPE_CHECKING:
    from ramify.grammar.matcher import Matcher
    from ramify.grammar.retokenize import Retokenizer


class Jump(NamedTuple):
    """Tokens that the grammar forces, already accepted by the matcher.

    `tokens` come instead of the last `replaced` ones. `draft` is the one after them if all goes as the
    text says; but longer tokens that begin like it are allowed as well, so the model has the word.
    """

    replaced: int
    tokens: tuple[int, ...]
    draft: int | None


class ConstrainedOutput:
    """`stop_ids` end an output; the matcher allows all of them where the text may end.

    `mask` is the (ceil(vocab / 32),) int32 bitmask of the tokens that may come next, or None where
    all may. It holds after `fill`, which every `accept` but the last must be followed by.
    """

    def __init__(
        self, matcher: Matcher, vocab_size: int, stop_ids: Sequence[int], retokenizer: Retokenizer | None
    ) -> None:
        self._matcher = matcher
        self._stop_ids = frozenset(stop_ids)
        self._retokenizer = retokenizer
        self._row = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        self.mask: np.ndarray | None = None

    @property
    def complete(self) -> bool:
        """The text so far is a whole one. Free text never is: where its tokens run out it is cut."""
        return self._matcher.complete and not self._matcher.free

    @property
    def needed(self) -> int:
        """Tokens, without a stop token, that suffice to complete the text; 0 where nobody can say."""
        return self._matcher.completion_tokens or 0

    def accept(self, token: int) -> None:
        """Advance over a token that the mask allowed."""
        if not self._matcher.accept(token):
            raise EngineError(f"The grammar refused token {token}, which its mask had allowed.")

    def fill(self, budget: int, *, may_be_empty: bool = False) -> None:
        """Compute `mask`: the tokens after which the text can still be completed within `budget` in all.

        Raises `EngineError` where the grammar allows nothing more, unless the mask `may_be_empty`.
        """
        restricts = self._matcher.fill_mask(self._row, budget)
        if restricts and not may_be_empty and not self._row.any():
            raise EngineError("The grammar allows no token here.")
        self.mask = self._row if restricts else None

    def only_end(self, budget: int) -> int | None:
        """A stop token, if nothing else may come."""
        if not self.complete:
            return None
        self.fill(budget)
        if self.mask is None:
            return None
        words = self.mask.view(np.uint32)
        allowed = int(np.bitwise_count(words).sum())
        stops = [token for token in self._stop_ids if int(words[token >> 5]) >> (token & 31) & 1]
        return min(stops) if stops and allowed == len(stops) else None

    def jump(self, before: Sequence[int], loose: int, room: int) -> Jump | None:
        """What must come after the output tokens `before`, of which the last `loose` may be replaced.

        At most `room` tokens may follow `before`, and the text must be completed within them.
        """
        if self._retokenizer is None:
            return self._single(room)
        data = self._matcher.forced_bytes()
        if not data:
            return None
        found = self._retokenizer.extend(before, loose, data)
        if found is None:
            return self._single(room)
        replaced, tokens = found
        kept = tuple(before[len(before) - replaced :])
        if kept == tokens[:replaced]:
            replaced, tokens = 0, tokens[len(kept) :]
        self._matcher.rollback(replaced)
        self._accept_all(tokens)
        draft = None
        # A token that comes instead of the last one stays: what predicts it has been used already.
        if len(tokens) > replaced and self._retokenizer.continues(tokens[-1]):
            self._matcher.rollback(1)
            tokens, draft = tokens[:-1], tokens[-1]
        if len(tokens) - replaced + self.needed > room:
            # The tokenizer's own spelling is not the shortest, and every token counts now.
            self._matcher.rollback(len(tokens))
            self._accept_all(kept[len(kept) - replaced :])
            return None
        return Jump(replaced, tokens, draft) if tokens or draft is not None else None

    def _single(self, room: int) -> Jump | None:
        """The one token that the mask leaves, where it leaves one."""
        if room < 1 or not self._matcher.fill_mask(self._row, room):
            return None
        token = single_token(self._row)
        if token is None or token in self._stop_ids:
            return None
        self.accept(token)
        return Jump(0, (token,), None)

    def _accept_all(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.accept(token)
