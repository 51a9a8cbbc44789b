"""The checkpoint folder of a batch on several actors: finished rows, and folders of other batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ramify as rm
from ramify.ray.parts import Parts, row_id

RECORD = {"program": {"name": "f"}, "options": {"temperature": "0"}, "code": {"f": "def f(s): pass"}}


def line(value: int, **error: Any) -> dict[str, Any]:
    failed = {"type": "E", **error} if error else None
    return {"outputs": {"x": value}, "returned": None, "error": failed, "usage": {}}


def parts(folder: Path, record: dict[str, Any] = RECORD, **given: Any) -> Parts:
    found = Parts(str(folder), record, **given)
    found.begin()
    return found


def test_rows_of_all_actors_are_found_by_the_next_one(tmp_path: Path) -> None:
    ids = [row_id({"n": n}) for n in range(300)]
    for begin in (0, 100):
        actor = parts(tmp_path).open()
        for n in range(begin, begin + 100):
            actor.append(ids[n], None, line(n))
        actor.close()
    found = parts(tmp_path).open()
    assert [found.find(one)["outputs"]["x"] for one in ids[:200]] == list(range(200))
    assert not any(found.find(one) for one in ids[200:])


def test_ids_that_agree_in_their_first_half_are_told_apart(tmp_path: Path) -> None:
    one, other, third = "0" * 31 + "1", "0" * 31 + "2", "0" * 31 + "3"
    actor = parts(tmp_path).open()
    actor.append(one, None, line(1))
    actor.append(other, None, line(2))
    actor.close()
    found = parts(tmp_path).open()
    assert (found.find(one)["outputs"], found.find(other)["outputs"]) == ({"x": 1}, {"x": 2})
    assert found.find(third) is None


def test_a_torn_last_line_is_no_result(tmp_path: Path) -> None:
    actor = parts(tmp_path).open()
    actor.append(row_id({"n": 1}), None, line(1))
    actor.append(row_id({"n": 2}), None, line(2))
    actor.close()
    (file,) = (path for path in tmp_path.iterdir() if path.name != "batch.jsonl")
    file.write_bytes(file.read_bytes()[:-5])
    found = parts(tmp_path).open()
    assert found.find(row_id({"n": 1}))
    assert not found.find(row_id({"n": 2}))


@pytest.mark.parametrize(
    ("error", "rerun", "stands"),
    [
        ({"transient": True}, "", False),
        ({"transient": False}, "", True),
        ({"transient": False}, "failed", False),
    ],
)
def test_failed_rows(tmp_path: Path, error: dict[str, bool], rerun: str, stands: bool) -> None:
    actor = parts(tmp_path).open()
    actor.append(row_id({"n": 1}), None, line(1, **error))
    actor.close()
    again = parts(tmp_path, rerun=frozenset(rerun.split())).open()
    assert (again.find(row_id({"n": 1})) is not None) == stands


def test_another_program_is_refused_run_again_or_kept(tmp_path: Path) -> None:
    actor = parts(tmp_path).open()
    actor.append(row_id({"n": 1}), None, line(1))
    actor.close()
    changed = {**RECORD, "code": {"f": "def f(s): s += 'x'"}}
    with pytest.raises(rm.InvalidRequest, match="the body of f changed: line 1") as refused:
        parts(tmp_path, changed)
    assert refused.value.field == "checkpoint"
    assert parts(tmp_path, changed, rerun=frozenset(["changed"])).open().find(row_id({"n": 1})) is None
    assert parts(tmp_path, changed, rerun=frozenset(["missing"])).open().find(row_id({"n": 1}))


def test_a_changed_program_is_refused_before_any_row_has_finished(tmp_path: Path) -> None:
    parts(tmp_path)
    with pytest.raises(rm.InvalidRequest, match="temperature was 0, is 1"):
        parts(tmp_path, {**RECORD, "options": {"temperature": "1"}})


def test_another_key_an_address_and_an_unseen_folder_are_refused(tmp_path: Path) -> None:
    parts(tmp_path, key="id")
    with pytest.raises(rm.InvalidRequest, match="known by id, not by their arguments"):
        parts(tmp_path)
    with pytest.raises(rm.InvalidRequest, match="must be a folder"):
        Parts("s3://bucket/done", RECORD).begin()
    with pytest.raises(rm.InvalidRequest, match="does not see"):
        Parts(str(tmp_path / "elsewhere"), RECORD).open()


def test_the_files_are_results_files(tmp_path: Path) -> None:
    actor = parts(tmp_path, key="id").open()
    actor.append(row_id({"n": 1}, 8), 8, line(1))
    actor.close()
    (file,) = (path for path in tmp_path.iterdir() if path.name != "batch.jsonl")
    header, written = map(json.loads, file.read_text().splitlines())
    assert header["ramify_results"] == 1
    assert header["key"] == {"name": "id"}
    assert (written["index"], written["header"], written["key"]) == (0, header["header"], 8)


def test_ids_have_128_bits_and_follow_key_and_arguments() -> None:
    ids = [row_id({"n": 1}), row_id({"n": 2}), row_id({"n": 1}, 1), row_id({"n": 1}, 2), row_id({"m": 1})]
    ids += [row_id({"n": np.zeros(2)}), row_id({"n": np.ones(2)}), row_id({"n": np.zeros((2, 1))})]
    assert len(set(ids)) == len(ids)
    assert {len(one) for one in ids} == {32}
    assert row_id({"a": 1, "b": 2}) == row_id({"b": 2, "a": 1})
    with pytest.raises(TypeError, match="of type object has no id"):
        row_id({"n": object()})
