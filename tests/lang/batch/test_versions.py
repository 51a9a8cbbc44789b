"""Results files: changes of the program are refused by name, and rows are found at any position."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import sys
import textwrap
import unittest.mock

import pytest

import ramify as rm
from ramify.errors import InvalidRequest
from ramify.lang.batch.masking import masked
from tests.lang.batch import batches
from tests.lang.batch.batches import by_index, lines

PROGRAM = """
    import functools
    import json
    import re
    from typing import Literal

    from pydantic import BaseModel

    import ramify as rm
    from {package} import prompts

    LABELS = ("yes", "no")
    WORD = re.compile("a+")
    TABLE = {{"short": len}}
    session = object()


    class Order(BaseModel):
        name: str
        kind: Literal["a", "b"]


    def shorten(text):
        # Cut it.
        return text[:40]


    @rm.function
    def other(s):
        s += "other"


    @rm.function
    def classify(s, text, tone="calm"):
        s += prompts.FEW_SHOT + shorten(text)
        s += rm.gen("label", choices=list(LABELS))
        if WORD.match(text) and TABLE and session:
            other(s)
            s += rm.gen("order", schema=Order)
        return json.dumps(prompts.helper(text))


    @rm.function
    async def aclassify(s, text, tone="calm"):
        s += prompts.FEW_SHOT + shorten(text)
        s += rm.gen("label", choices=list(LABELS))
"""
PROMPTS = """
    FEW_SHOT = "The kettle works: yes. "

    def helper(text):
        return text + SUFFIX

    SUFFIX = "!"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A package of the user; `load` imports its modules anew."""
    package = tmp_path / "users_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "main.py").write_text(textwrap.dedent(PROGRAM).format(package="users_package"))
    (package / "prompts.py").write_text(textwrap.dedent(PROMPTS))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [name for name in sys.modules if name.startswith("users_package")]:
        del sys.modules[name]


def load(folder):
    for name in [name for name in sys.modules if name.startswith("users_package")]:
        del sys.modules[name]
    for cached in folder.glob("__pycache__/*"):
        cached.unlink()  # an edit within a second, of the same length, would not be seen
    importlib.invalidate_caches()
    return importlib.import_module("users_package.main")


def edit(folder, old, new, name="main.py"):
    path = folder / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def header(out):
    return json.loads(out.read_text().splitlines()[0])


def run(program, rows, out, **options):
    backend = rm.ScriptedBackend({"label": "yes", "x": "yes"})
    return batches.run(program, rows, out=out, **{"backend": backend, **options})


ROWS = [{"text": text} for text in ("one", "two", "three")]


def test_the_header_says_what_was_run(folder, out):
    run(load(folder).classify, ROWS, out, temperature=0.5, tone="loud")
    found = header(out)
    assert found["program"] == {"name": "classify"}
    assert found["backend"] == {"kind": "ScriptedBackend"}
    assert found["model"] == {"name": "scripted"}
    assert found["options"] == {"temperature": "0.5"}
    assert found["arguments"] == {"tone": "'loud'"}
    assert set(found["code"]) == {
        *("classify", "shorten", "other", "Order"),
        "users_package.prompts.helper",
    }
    assert found["code"]["shorten"].startswith("def shorten(text):\n    # Cut it.\n")
    assert found["values"] == {
        "users_package.prompts.FEW_SHOT": "'The kettle works: yes. '",
        "users_package.prompts.SUFFIX": "'!'",
        "LABELS": "('yes', 'no')",
        "WORD": "re.compile('a+')",
        "classify.tone": "'calm'",
    }
    assert found["names"]["json.dumps"] == "json.dumps"
    assert found["names"]["TABLE['short']"] == "builtins.len"
    assert found["unknown"] == {"session": "of type object"}
    assert {line["header"] for line in lines(out)} == {found["header"]}


CHANGES = [
    ("shorten(text)\n", "shorten(text).upper()\n", "the body of classify changed: line 3 was "),
    ("text[:40]", "text[:50]", "shorten changed: line 3 was return text[:40], is return text[:50]"),
    ('"a", "b"', '"a", "c"', "Order changed: line 3 was "),
    ('("yes", "no")', '("yes", "not")', "LABELS was ('yes', 'no'), is ('yes', 'not')"),
    ('"a+"', '"b+"', "WORD was re.compile('a+'), is re.compile('b+')"),
    ('s += "other"', 's += "another"', 'other changed: line 3 was s += "other"'),
    ("session = object()", "session = []", "session was not there, is []"),
]


@pytest.mark.parametrize(("old", "new", "message"), CHANGES)
def test_a_change_of_the_program_is_refused_and_named(folder, out, old, new, message):
    run(load(folder).classify, ROWS, out)
    before = out.read_bytes()
    edit(folder, old, new)
    with pytest.raises(InvalidRequest) as refused:
        run(load(folder).classify, ROWS, out)
    assert message in str(refused.value)
    assert "--rerun changed" in str(refused.value)
    assert out.read_bytes() == before


@pytest.mark.parametrize(("old", "new"), [("works", "broke"), ('"!"', '"?"'), ("text + SUFFIX", "text")])
def test_a_change_in_another_module_is_seen(folder, out, old, new):
    run(load(folder).classify, ROWS, out)
    edit(folder, old, new, "prompts.py")
    with pytest.raises(InvalidRequest, match=r"users_package\.prompts\.(FEW_SHOT|SUFFIX|helper)"):
        run(load(folder).classify, ROWS, out)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# Cut it.", "# Cut the text, so that it fits."),
        ("return text[:40]", "return (\n            text[:40]\n        )"),
        ("LABELS = ", "UNUSED = 5\nLABELS = "),
    ],
)
def test_comments_and_layout_are_no_change(folder, out, old, new):
    run(load(folder).classify, ROWS, out)
    edit(folder, old, new)
    summary = run(load(folder).classify, ROWS, out)
    assert (summary.rows, summary.skipped) == (0, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.7}, "temperature was not there, is 0.7"),
        ({"tone": "loud"}, "the argument tone was not there, is 'loud'"),
        ({"key": "text"}, "known by their content, not by text"),
    ],
)
@pytest.mark.parametrize("name", ["classify", "aclassify"])
def test_other_options_are_refused(folder, out, name, options, message):
    program = getattr(load(folder), name)
    run(program, ROWS, out)
    with pytest.raises(InvalidRequest, match=message):
        run(program, ROWS, out, **options)


def test_another_model_and_another_server_are_refused(folder, out):
    class Served(rm.ScriptedBackend):
        def __init__(self, model, url):
            super().__init__({"label": "yes"})
            self.model, self.base_url = model, url

        async def info(self):
            import msgspec

            return msgspec.structs.replace(await super().info(), name=self.model)

    program = load(folder).classify
    run(program, ROWS, out, backend=Served("small", "http://me:secret@host:1"))
    assert header(out)["backend"] == {"kind": "Served", "url": "http://host:1"}
    with pytest.raises(InvalidRequest, match="the model's name was small, is big"):
        run(program, ROWS, out, backend=Served("big", "http://host:1"))
    with pytest.raises(InvalidRequest, match="the backend's url was http://host:1, is http://host:2"):
        run(program, ROWS, out, backend=Served("small", "http://host:2"))
    summary = run(program, ROWS, out, backend=Served("small", "http://host:2"), rerun="missing")
    assert (summary.rows, summary.skipped) == (0, 3)


def test_rerun_changed_replaces_what_is_not_up_to_date(folder, out):
    run(load(folder).classify, ROWS, out)
    old = header(out)["header"]
    edit(folder, "text[:40]", "text[:50]")
    module = load(folder)

    summary = run(module.classify, ROWS[:1], out, rerun="changed")  # as if it had been stopped then
    assert (summary.rows, summary.others, summary.outdated) == (1, 2, 2)
    assert "2 results in the file are of another version" in str(summary)
    assert "2 results in the file" in summary._repr_html_()
    found = {line["index"]: line["header"] for line in lines(out)}
    assert len(lines(out)) == 3
    assert found[0] != old == found[1]
    with pytest.raises(InvalidRequest, match="shorten changed"):
        run(module.classify, ROWS, out)
    summary = run(module.classify, ROWS, out, rerun="changed")
    assert (summary.rows, summary.skipped, summary.outdated) == (2, 1, 0)
    assert "another version" not in str(summary)
    assert len(lines(out)) == 3
    assert header(out)["header"] == found[0]  # the old one went with its last line
    assert run(module.classify, ROWS, out).skipped == 3


class Unstarted(rm.ScriptedBackend):
    async def info(self):
        raise AssertionError("the model was asked for")


def test_a_changed_program_is_refused_before_the_model_is_asked_for(folder, out):
    class Loaded(Unstarted):
        info = rm.ScriptedBackend.info

    Loaded.__name__ = Unstarted.__name__
    run(load(folder).classify, ROWS, out, backend=Loaded({"label": "yes"}))
    edit(folder, "text[:40]", "text[:50]")
    classify = load(folder).classify
    for options in ({}, {"rerun": "failed"}, {"dry_run": True}):
        with pytest.raises(InvalidRequest, match="shorten changed"):
            run(classify, ROWS, out, backend=Unstarted({}), **options)
    with pytest.raises(InvalidRequest, match="known by their content, not by text"):
        run(classify, ROWS, out, backend=Unstarted({}), key="text")
    with pytest.raises(AssertionError, match="was asked for"):
        run(classify, ROWS, out, backend=Unstarted({}), rerun="changed")


def test_rerun_missing_runs_new_rows_and_keeps_the_others(folder, out):
    run(load(folder).classify, ROWS[:2], out)
    edit(folder, "text[:40]", "text[:50]")
    summary = run(load(folder).classify, ROWS, out, rerun="missing")
    assert (summary.rows, summary.skipped, summary.outdated) == (1, 2, 2)
    assert len({line["header"] for line in lines(out)}) == 2
    summary = run(load(folder).classify, ROWS, out, rerun="missing")
    assert str(summary).startswith("no row was left to run")
    assert "2 results in the file are of another version" in str(summary)
    with pytest.raises(InvalidRequest, match="shorten changed") as refused:
        run(load(folder).classify, [ROWS[2], *ROWS[:2]], out)
    assert refused.value.__notes__ == [f"1 of 3 rows have their results in {out}, which stay."]


# --- rows ---------------------------------------------------------------------------------------


@rm.function
def label(s, text):
    s += text + rm.gen("label")


@pytest.mark.parametrize("key", [None, "text"])
def test_rows_are_known_wherever_they_stand(out, key):
    rows = [{"text": text} for text in "abcdef"]
    run(label, rows, out, key=key)
    moved = [{"text": text} for text in "fxebad"]  # reordered, c removed, x inserted
    summary = run(label, moved, out, key=key)
    assert (summary.rows, summary.skipped, summary.others) == (1, 5, 1)
    assert "1 more results, of rows other than these" in str(summary)
    assert len(lines(out)) == 7


def test_equal_rows_are_counted(out):
    rows = [{"text": "a"}] * 3 + [{"text": "b"}]
    assert run(label, rows, out).rows == 4
    assert sorted(line.get("copy", 0) for line in lines(out)) == [0, 0, 1, 2]
    assert run(label, rows, out).skipped == 4
    assert run(label, [*rows, {"text": "a"}, {"text": "b"}], out).rows == 2
    summary = run(label, rows[2:], out)
    assert (summary.rows, summary.skipped, summary.others) == (0, 2, 4)


def test_an_edited_row_with_a_key_runs_again_and_replaces_its_line(out):
    rows = [{"id": n, "text": f"text {n}"} for n in range(5)]
    run(label, rows, out, key="id")
    rows[3] = {"id": 3, "text": "edited"}
    summary = run(label, rows, out, key="id")
    assert (summary.rows, summary.skipped, summary.others) == (1, 4, 0)
    found = lines(out)
    assert sorted(line["key"] for line in found) == list(range(5))
    assert found[-1]["key"] == 3
    assert list(out.parent.iterdir()) == [out]


def test_a_doubled_key_is_refused(out):
    rows = [{"id": n % 7, "text": "x"} for n in range(10)]
    with pytest.raises(InvalidRequest, match="Rows 0 and 7 of the input have the same id: 0"):
        run(label, rows, out, key="id")
    assert not out.exists()  # found before a row ran


def test_a_doubled_key_of_rows_that_are_read_once_does_not_promise_to_go_on(out):
    rows = ({"id": n % 7, "text": "x"} for n in range(10))
    with pytest.raises(InvalidRequest, match="Rows 0 and 7") as refused:
        label.run_batch(
            rows, out=out, key="id", look_ahead=1, concurrency=1, backend=rm.ScriptedBackend(lambda _: "yes")
        )
    (note,) = refused.value.__notes__
    assert note.endswith(f"rows have their results in {out}, which stay.")


def test_a_killed_rerun_leaves_both_lines_and_the_last_one_counts(out):
    rows = [{"id": n, "text": f"text {n}"} for n in range(3)]
    run(label, rows, out, key="id")
    text = out.read_text()
    line = next(line for line in text.splitlines() if '"key":1' in line)
    out.write_text(text + line.replace('"error":null', '"error":{"transient":true}') + "\n")
    summary = run(label, rows, out, key="id")
    assert (summary.rows, summary.skipped) == (1, 2)
    assert sorted(line["key"] for line in lines(out)) == [0, 1, 2]
    assert all(line["error"] is None for line in lines(out))


def test_a_file_of_an_earlier_version_is_refused_by_name(out):
    before = '{"index":0,"digest":"283e8c37","outputs":{"x":1},"returned":null,"error":null}\n'
    out.write_text(before)
    with pytest.raises(InvalidRequest, match="written by an earlier version of Ramify"):
        run(label, [{"text": "a"}], out)
    assert out.read_text() == before


def test_a_torn_header_is_cut_off(out):
    out.write_text('{"ramify_results":1,"header":"a"')
    assert run(label, [{"text": "a"}], out).rows == 1
    assert header(out)["program"] == {"name": "label"}


def test_secrets_are_not_written(out):
    api_key = "sk-12345"

    @rm.function
    def program(s, text):
        s += text + str(len(api_key)) + rm.gen("x")

    run(program, [{"text": "x"}], out)
    assert "sk-12345" not in out.read_text()
    api_key = "sk-54321"
    with pytest.raises(InvalidRequest, match=r"api_key was hidden_[0-9a-f]{12}, is hidden_"):
        run(program, [{"text": "x"}], out)


@dataclasses.dataclass
class Account:
    user: str
    password: str
    note: str = "Bearer qwertz"


LONG = "Zx9" * 8


@pytest.mark.parametrize(
    "value",
    [
        {"api_key": "hunter2", "url": "http://x"},
        {"a": [{"Authorization": ("x", "hunter2")}]},
        {"API_TOKENS": ["hunter2"], "client": object()},
        {"client": object(), "more": {"password": b"hunter2"}},
        ["Bearer hunter2"],
        "Authorization: Basic hunter2x",
        "postgres://me:hunter2@host/db",
        "http://host/?v=1&api_key=hunter2",
        "sk-proj-hunter2",
        f"ghp_{LONG}",
        Account("me", "hunter2"),
        Account("hunter", f"x{LONG}"),
    ],
)
def test_what_looks_like_a_credential_is_masked_in_any_value(out, value):
    @rm.function
    def program(s, text):
        s += text + str(bool(value)) + rm.gen("x")

    run(program, [{"text": "x"}], out)
    text = out.read_text()
    assert "hidden_" in text
    assert not [secret for secret in ("hunter2", "qwertz", LONG) if secret in text]
    assert run(program, [{"text": "x"}], out).skipped == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_credentials_in_the_source_are_masked(out, compiled):
    class Login:
        user_password: str = 'hun"ter2'
        config = str({"api-key": "hunter2"})

    @rm.function
    def program(s, text, token="hunter2"):
        Login.secret = """hunter2"""  # as a comment
        s += f"{text} Bearer hunter2" + rm.gen("x")

    program = program.compile(token="hunter2") if compiled else program
    run(program, [{"text": "x"}], out)
    assert "hunter2" not in out.read_text()
    assert "ter2" not in out.read_text()
    assert all(ast.parse(source) for source in header(out)["code"].values())


@pytest.mark.parametrize(
    "text",
    [
        'f(key="", keyword="a", tokenizer=\'b\', max_tokens=30)',
        "The key: it is in the basics. Bearer of news, sk-learn, a_long_name_of_2_parts_in_a_row",
        "claude-3-5-sonnet-20241022 Meta-Llama-3-8B-Instruct http://host/docs/v2/page?id=5 a@b.de",
        "12345678901234567890 incomprehensibilities",
    ],
)
def test_prompts_stay_readable(text):
    assert masked(text) == text


def test_a_prompt_that_was_edited_beside_a_credential_is_named(out):
    def make(prompt):
        config = {"api_key": "hunter2", "prompt": prompt}

        @rm.function
        def program(s, text):
            s += config["prompt"] + text + rm.gen("x")

        return program

    run(make("Be calm."), [{"text": "x"}], out)
    with pytest.raises(InvalidRequest, match=r"config was .*hidden_.*Be calm.*, is .*Be quick"):
        run(make("Be quick."), [{"text": "x"}], out)


def test_functions_without_source_differ_by_their_constants(out):
    def make(body):
        scope = {"__name__": "made"}
        exec(f"def prompt(): return {body}", scope)
        prompt = scope["prompt"]

        @rm.function
        def program(s, text):
            s += str(prompt()) + text + rm.gen("x")

        return program

    bodies = "'a'", "'b'", "(lambda: 'a')()", "(lambda: 'b')()", "'x' in {'a', 'b'}", "len('a')", "str('a')"
    for body in bodies:
        one = out.with_name(f"{bodies.index(body)}.jsonl")
        run(make(body), [{"text": "x"}], one)
        assert run(make(body), [{"text": "x"}], one).skipped == 1
        for other in bodies:
            if other != body:
                with pytest.raises(InvalidRequest, match="prompt changed"):
                    run(make(other), [{"text": "x"}], one)


def test_objects_that_make_attributes_up_do_no_harm(out):
    mock = unittest.mock.MagicMock()

    @rm.function
    def program(s, text):
        s += text + str(bool(mock.anything)) + rm.gen("label")

    assert run(program, [{"text": "x"}], out).failed == 0
    assert header(out)["unknown"] == {"mock": "of type MagicMock"}


def test_decorators_are_followed(out):
    def make(prefix, suffix="."):
        def polite(body):
            @functools.wraps(body)
            def inner(s, text):
                s += prefix
                return body(s, text)

            return inner

        @rm.function
        @polite
        def program(s, text):
            s += text + suffix + rm.gen("label")

        return program

    run(make("Please. "), [{"text": "x"}], out)
    assert run(make("Please. "), [{"text": "x"}], out).skipped == 1
    for changed in (make("Now! "), make("Please. ", "!")):
        with pytest.raises(InvalidRequest, match=r"(prefix|suffix) was"):
            run(changed, [{"text": "x"}], out)


def test_an_error_in_a_library_has_the_line_of_the_user(out):
    @rm.function
    def program(s, text):
        return json.loads(text)

    run(program, [{"text": "{"}, {"wrong": 1}], out)
    inside, refused = by_index(out)
    number = inspect.getsourcelines(program.body)[1] + 2
    assert inside["error"]["line"] == f"{__file__}:{number}"
    assert "json/decoder.py" in inside["error"]["traceback"]
    assert refused["error"]["line"] is refused["error"]["traceback"] is None


@pytest.mark.parametrize("compiled", [False, True])
def test_closures_and_compiled_programs(out, compiled):
    def make(prefix):
        @rm.function
        def program(s, text):
            s += prefix + text + rm.gen("x")

        return program.compile() if compiled else program

    run(make("a"), [{"text": "x"}], out)
    assert run(make("a"), [{"text": "x"}], out).skipped == 1
    with pytest.raises(InvalidRequest, match="prefix was 'a', is 'b'"):
        run(make("b"), [{"text": "x"}], out)
