"""Distinct tokens against a set of all prefixes."""

from __future__ import annotations

import random

import pytest

from ramify.radix.tree import TokenTree


@pytest.mark.parametrize("seed", range(10))
def test_it_counts_what_a_set_of_prefixes_counts(seed: int) -> None:
    dice = random.Random(seed)
    tree, prefixes = TokenTree(), set[tuple[int, ...]]()
    sequences: list[list[int]] = [[]]
    for _ in range(200):
        earlier = dice.choice(sequences)
        tokens = [*earlier[: dice.randrange(len(earlier) + 1)], *dice.choices(range(3), k=dice.randrange(6))]
        sequences.append(tokens)
        ends = [tuple(tokens[: end + 1]) for end in range(len(tokens))]
        assert tree.insert(tokens) == sum(end in prefixes for end in ends)
        prefixes.update(ends)
        assert tree.tokens == len(prefixes)
