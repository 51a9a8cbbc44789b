"""When it pays to read a shared prefix once for all its branches: a cost model of a few figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ramify.kernels.reference.cascade import Group
from ramify.kernels.triton.plan.attention_plan import Shape


@dataclasses.dataclass(frozen=True)
class Costs:
    """Figures of an H100-class device. Errors in them move the choice only where little is at stake.

    memory, cache : bytes a second from device memory, and of repeated reads from its cache
    cache_bytes : what is read repeatedly comes from the cache up to this size
    flops : of attention in tiles of many rows
    launch : seconds of a launch more
    margin : the share of the flat time that must be saved
    """

    memory: float = 3.0e12
    cache: float = 5.0e12
    cache_bytes: int = 32 << 20
    flops: float = 4.0e14
    launch: float = 4e-6
    margin: float = 0.05

    def choose(
        self, groups: Sequence[Group], new: Sequence[int], kv_lens: Sequence[int], shape: Shape
    ) -> list[Group]:
        """The nodes worth their states, and none where all of them are not worth two launches more.

        A node below one that is left out splits what its members read on their own, which costs a state more.

        Parameters
        ----------
        groups : parents before children, as `find_groups` gives them
        new, kv_lens : for each sequence, its new tokens and all of them
        """
        chosen: list[Group] = []
        reached = [0] * len(new)
        saved = 0.0
        for group in groups:
            counts = [new[row] for row in group.members if new[row]]
            rest = sum(new[row] for row in group.members if new[row] and reached[row] < group.begin)
            gain = self._read(counts, group.tokens, shape) - self._read([sum(counts)], group.tokens, shape)
            gain -= self._state(sum(counts) + rest, shape)
            if gain > 0:
                chosen.append(group)
                saved += gain
                for row in group.members:
                    reached[row] = group.begin + group.tokens
        merged = sum(count for count, end in zip(new, reached, strict=True) if end)
        flat = sum(self._read([count], length, shape) for count, length in zip(new, kv_lens, strict=True))
        fixed = 2 * self.launch + self._state(merged, shape)
        return chosen if saved - fixed > self.margin * flat else []

    def _read(self, counts: Sequence[int], tokens: int, shape: Shape) -> float:
        """Seconds in which runs of `counts` queries each read the same `tokens` keys and values."""
        group = shape.heads // shape.kv_heads
        sizes = [tile.rows for tile in shape.tiles]
        tiles = padded = 0
        for count in counts:
            rows = count * group
            size = next((size for size in sizes if size >= rows), sizes[-1])
            tiles += -(-rows // size)
            padded += -(-rows // size) * size
        if not tiles or not tokens:
            return 0.0
        read = 2 * tokens * shape.kv_heads * shape.head_dim * shape.element_size
        again = self.cache if read <= self.cache_bytes else self.memory
        moving = read / self.memory + (tiles - 1) * read / again
        computing = 4 * padded * shape.kv_heads * tokens * shape.head_dim / self.flops
        return max(moving, computing)

    def _state(self, tokens: int, shape: Shape) -> float:
        """Seconds of writing and reading back one state of so many tokens."""
        return 2 * 4 * tokens * shape.heads * (shape.head_dim + 2) / self.memory
