from __future__ import annotations

import numpy as np
import pytest

from ramify.radix.cache import PrefixCache
from ramify.radix.key import encode, first_token, shared_bytes


def test_every_form_of_the_same_tokens_is_the_same_key() -> None:
    tokens = [5, 0, 2**31 - 1, -(2**31)]
    forms = [tokens, tuple(tokens), np.array(tokens), np.array(tokens, np.int32), np.array(tokens * 2)[:4]]
    strided = np.zeros((4, 2), np.int32)
    strided[:, 0] = tokens
    assert {encode(form) for form in [*forms, strided[:, 0]]} == {np.array(tokens, np.int32).tobytes()}
    assert encode([]) == b""
    assert first_token(encode([-7, 3])) == -7


@pytest.mark.parametrize(
    "wrong", [[2**31], np.array([2**31], np.uint32), [[1, 2]], np.zeros((2, 2), np.int32)]
)
def test_what_does_not_fit_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"int32|flat"):
        PrefixCache(2, 2).match(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [[1.5], np.array([1.0]), ["a"]])
def test_what_is_no_token_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="integers are needed"):
        encode(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("same", range(6))
def test_shared_bytes_count_whole_tokens(same: int) -> None:
    edge = [258, 259, 260, 261, 262]
    other = [9, 9, *edge[:same], *[token ^ 1 for token in edge[same:]]]  # differ in the lowest byte only
    assert shared_bytes(encode(edge), encode(other), 8) == 4 * same
    assert shared_bytes(encode(edge), encode(other[:-2]), 8) == 4 * min(same, 3)
