"""A cost model that chooses the shared prefixes worth reading once for all their branches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ramify.kernels.reference.cascade import Group
from ramify.kernels.triton.plan.attention_config import Device
from ramify.kernels.triton.plan.attention_plan import Shape


@dataclasses.dataclass(frozen=True)
class Costs:
    """The cost model. Errors in its figures matter only for close choices. None was measured on a card: see
    docs/kernels.md.

    memory, cache : bytes a second from device memory, and of repeated reads from the L2 cache
    cache_bytes : repeated reads of at most this size come from the cache
    flops : of attention in tiles of many rows, a second
    launch : seconds of one more launch
    margin : share of the time without a cascade that a cascade must save
    """

    memory: float = 3.0e12
    cache: float = 5.0e12
    cache_bytes: int = 32 << 20
    flops: float = 4.0e14
    launch: float = 4e-6
    margin: float = 0.05

    @staticmethod
    def for_device(device: Device) -> Costs:
        return Costs(device.memory, device.cache, device.cache_bytes, device.flops)

    def choose(
        self, groups: Sequence[Group], new: Sequence[int], kv_lens: Sequence[int], shape: Shape
    ) -> list[Group]:
        """The nodes that save more than their states cost; [] if together they are not worth two launches.

        A node that does not begin where its chosen parent ends costs one more state for each of its tokens.

        Parameters
        ----------
        groups : parents before children, as from `find_groups`
        new, kv_lens : for each sequence, its number of new tokens and of all tokens
        """
        chosen: list[Group] = []
        reached = [0] * len(new)
        saved = 0.0
        for group in groups:
            counts = [new[row] for row in group.members if new[row]]
            rest = sum(new[row] for row in group.members if new[row] and reached[row] < group.begin)
            gain = self.time_of(counts, group.tokens, shape) - self.time_of(
                [sum(counts)], group.tokens, shape
            )
            gain -= self._state(sum(counts) + rest, shape)
            if gain > 0:
                chosen.append(group)
                saved += gain
                for row in group.members:
                    reached[row] = group.begin + group.tokens
        merged = sum(count for count, end in zip(new, reached, strict=True) if end)
        flat = sum(self.time_of([count], length, shape) for count, length in zip(new, kv_lens, strict=True))
        fixed = 2 * self.launch + self._state(merged, shape)
        return chosen if saved - fixed > self.margin * flat else []

    def time_of(self, counts: Sequence[int], tokens: int, shape: Shape) -> float:
        """Seconds for tasks of `counts` queries each to attend to the same `tokens` positions."""
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
        """Seconds to write and read back one state for each of `tokens` tokens."""
        return 2 * 4 * tokens * shape.heads * (shape.head_dim + 2) / self.memory
