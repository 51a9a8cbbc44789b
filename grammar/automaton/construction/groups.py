"""Groups of atoms: the atoms that the same positions of a state read.

The positions in texts come first: each reads one atom, so that its group is found in one look-up. A set of
characters then divides these groups by masks of atoms, in time proportional to the groups, not to the atoms.
In the names of an object that may have other names:

    "d"                  {d}
    "e"                  {d} {e}
    any but a quote      {d} {e} {all others but a quote}      the first two are read by two positions each
"""

from __future__ import annotations

import numpy as np

from ramify.grammar.automaton.construction.work import FULL, SPLITS, STATUS, Work, part


@part
def _add_group(work: Work, groups: int, parent: int, position: int, first: int) -> int:
    """Add a group whose positions are `position` and those of the split `parent`. `first` is the index of its
    first position. Returns the number of groups."""
    work.groups[groups].split = _split(work, parent, position)
    work.groups[groups].first = first
    return groups + 1


@part
def _split(work: Work, parent: int, position: int) -> int:
    new = work.counts[SPLITS]
    if new == work.splits.size:
        work.counts[STATUS] = FULL
        return 0
    work.counts[SPLITS] += 1
    work.splits[new].parent, work.splits[new].position = parent, position
    return int(new)


@part
def place_atom(work: Work, groups: int, index: int, position: int, atom: int, words: int) -> int:
    """Add `position`, the one at `index` in ``work.parts``, which reads `atom` alone, to the group of `atom`.
    All groups have one atom so far. Returns the number of groups."""
    group = work.groups[atom].of_atom  # may be left from an earlier state
    if group < groups and work.groups[group].atom == atom:
        work.groups[group].split = _split(work, work.groups[group].split, position)
        return groups
    work.groups[atom].of_atom = groups
    work.groups[groups].atom = atom
    work.group_bits[groups * words : (groups + 1) * words] = 0
    work.group_bits[groups * words + (atom >> 6)] = np.uint64(1) << np.uint64(atom & 63)
    return int(_add_group(work, groups, 0, position, index))


@part
def divide(work: Work, groups: int, index: int, position: int, words: int) -> int:
    """Divide the groups of atoms by the atoms in `work.rest_bits`, which `position`, the one at `index` in
    ``work.parts``, reads. Returns the number of groups."""
    bits, rest = work.group_bits, work.rest_bits
    for group in range(groups):
        begin = group * words
        some = False
        whole = True
        for word in range(words):
            inside = bits[begin + word] & rest[word]
            some |= inside != 0
            whole &= inside == bits[begin + word]
        if not some:
            continue
        split = work.groups[group].split
        if whole:
            for word in range(words):
                rest[word] &= ~bits[begin + word]
            work.groups[group].split = _split(work, split, position)
            work.groups[group].first = min(work.groups[group].first, index)
            continue
        new = groups * words
        for word in range(words):
            bits[new + word] = bits[begin + word] & rest[word]
            bits[begin + word] &= ~rest[word]
            rest[word] &= ~bits[new + word]
        groups = _add_group(work, groups, split, position, work.groups[group].first)
    left = False
    for word in range(words):
        left |= rest[word] != 0
    if left:
        for word in range(words):
            bits[groups * words + word] = rest[word]
        groups = _add_group(work, groups, 0, position, index)
    return groups


@part
def sort_groups(work: Work, groups: int, words: int) -> None:
    """Sort the groups by their first position and their lowest atom: their indices are then in the field
    `order`."""
    atoms = work.groups.size
    for group in range(groups):
        word = 0
        while not work.group_bits[group * words + word]:
            word += 1
        lowest = word << 6
        while not work.group_bits[group * words + word] >> np.uint64(lowest & 63) & np.uint64(1):
            lowest += 1
        work.groups[group].key = work.groups[group].first * atoms + lowest
        work.groups[group].order = group
    gap = groups  # Shell's sort: a state may have as many groups as an enum has first characters
    while gap > 1:
        gap = gap // 3 + 1 if gap > 3 else 1
        for end in range(gap, groups):
            group, place = work.groups[end].order, end
            while place >= gap and work.groups[work.groups[place - gap].order].key > work.groups[group].key:
                work.groups[place].order = work.groups[place - gap].order
                place -= gap
            work.groups[place].order = group
