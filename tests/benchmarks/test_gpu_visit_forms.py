"""The forms that the kit of a visit carries (`benchmarks.gpu_visit.forms`), noted without a GPU."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu_visit.forms import note_cases

pytestmark = pytest.mark.slow


def test_cases_are_noted_in_the_dtype_of_the_card() -> None:
    """A form in another dtype is compiled in vain, and the launched one is compiled within the visit."""
    found = set()
    for form in note_cases(90):
        given = json.loads(form.specialisation)["signature"]
        halves = [name for name, kind in given.items() if kind == "*fp16"]
        found |= {(form.kernel, name) for name in halves}
    assert found == {("_quantised_product", "factor_ptr")}, "W4A16 weights alone have float16 factors"
