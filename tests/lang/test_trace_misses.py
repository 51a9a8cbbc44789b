"""The reasons for computed prompt tokens, found from the program's own requests."""

from __future__ import annotations

import json
import re
from array import array

import pytest

import ramify as rm
from ramify.lang.prompt.transcript import Piece
from ramify.lang.trace.calls import Call
from ramify.lang.trace.misses import Misses
from ramify.lang.trace.outputs import Span, Tokens, tokens_of
from ramify.messages import TextChunk, TokenLogprobs, Usage
from tests.lang.steps import program_of


def run(body, answers):
    backend = rm.ScriptedBackend(answers)
    state = rm.function(body).run(backend=backend)
    state.sync()
    misses = Misses(state.trace)
    return [(call.name, misses.why.get(call), misses.cached[call]) for call in misses.cached], backend


def test_the_first_request_has_nothing_to_find():
    def body(s):
        s += "one two three" + rm.gen("x")

    [(_, miss, cached)], _ = run(body, {"x": "a"})
    assert (miss.reason, miss.computed_tokens, miss.nearest) == ("first", 3, None)
    assert str(miss) == "No earlier request of this program begins like this one."
    assert (cached.chars, cached.exact) == (0, True)


def test_a_later_turn_is_new_after_the_earlier_one():
    def body(s):
        s += "one two three" + rm.gen("x") + " and then more" + rm.gen("y")

    [_, (_, miss, cached)], _ = run(body, {"x": " four five", "y": "b"})
    assert (miss.reason, miss.nearest.name, miss.token, miss.other) == ("extends", "x", " and", "")
    assert str(miss) == "New after all that gen 'x' held; it begins with ' and'."
    assert cached.chars == len("one two three four five")
    assert cached.exact


def test_a_branch_parts_from_its_sibling():
    def body(s):
        s += "Judge the essay for" + rm.gen("x", max_tokens=1)
        for fork, aspect in zip(s.fork(2), ("clarity of style", "cleverness of style"), strict=True):
            fork += " its " + aspect + rm.gen(aspect.split()[0])
            fork.sync()

    results, _ = run(body, {"x": " me", "clarity": "a", "cleverness": "b"})
    _, miss, cached = results[-1]
    assert (miss.reason, miss.nearest.name) == ("diverges", "clarity")
    assert (miss.token, miss.other) == (" cleverness", " clarity")
    assert str(miss) == "Parts from gen 'clarity': ' cleverness' where that one has ' clarity'."
    shared = "Judge the essay for me its cl"
    assert miss.shared_chars == len(shared)
    # Six of nine tokens, somewhere between the end of the first output and the end of the prompt.
    assert not cached.exact
    assert len("Judge the essay for me") < cached.chars < len("Judge the essay for me its cleverness")


def test_generated_text_is_told_by_its_tokens():
    @rm.function
    def program(s):
        with s.copy() as first:
            first += "It is" + rm.gen("x")
            first["x"]
        s += "It is big round today" + rm.gen("y")

    state = program.run(backend=rm.ScriptedBackend({"x": " big red", "y": "."}))
    first, last = (call for call in state.trace.walk() if call.kind == "gen")
    miss, red = Misses(state.trace).why[last], first.tokens.ids[1]
    assert (miss.reason, miss.nearest) == ("diverges", first)
    assert (miss.token, miss.token_id, miss.other, miss.other_id) == (" round", None, " red", red)
    assert str(miss) == f"Parts from gen 'x': ' round' where that one has ' red' (token {red})."
    assert (miss.to_dict()["token_id"], miss.to_dict()["other_id"]) == (None, red)


def test_a_prompt_of_ids_is_told_by_its_tokens():
    """Two requests that continue from different outputs, like the samples of one gen."""
    generated = {8: " red", 9: " round"}
    root = Call("program", "p")
    for number, (token, text) in enumerate(generated.items()):
        alone = request(f"x {number}", "?", float(number), number + 0.2, 1, 0)
        alone.text, alone.tokens = text, tokens_of([chunk(text, (token,))])
        after = request(f"y {number}", "", number + 0.3, number + 0.5, 40, 1)
        after.prompt_end = Piece(Piece(None, "It is", "It is"), (token,), text)
        root.children += [alone, after]
    miss = Misses(root).why[root.children[-1]]
    assert (miss.reason, miss.nearest.name) == ("diverges", "y 0")
    assert (miss.token, miss.token_id, miss.other, miss.other_id) == (" round", 9, " red", 8)


def test_what_was_computed_and_is_gone_is_lost():
    backend = rm.ScriptedBackend({"x": " four five", "y": "b"})

    @rm.function
    def program(s):
        s += "one two three" + rm.gen("x")
        s["x"]
        backend.flush_cache()
        s += " more" + rm.gen("y")

    state = program.run(backend=backend)
    miss = Misses(state.trace).why[state.trace.children[1]]
    assert (miss.reason, miss.computed_tokens) == ("lost", 6)
    assert "had computed more of this prompt than was found: evicted, or never kept" in str(miss)
    assert not miss.respelled


def test_generated_text_that_is_sent_as_text_is_named():
    backend = rm.ScriptedBackend({"x": " four five", "y": "b"})

    @rm.function
    def program(s):
        with s.copy() as first:
            first += "one two three" + rm.gen("x")
            text = first["x"]
        backend.flush_cache()
        s += "one two three" + text + " more" + rm.gen("y")

    state = program.run(backend=backend)
    miss = Misses(state.trace).why[state.trace.children[1]]
    assert miss.reason == "lost"
    assert miss.respelled
    assert str(miss).endswith("its generated text was sent again as text, and other tokens spell it.")


def request(name, text, start, first, prompt, cached, **lost):
    usage = Usage(prompt_tokens=prompt, cached_tokens=cached, **lost)
    return Call(
        "gen",
        name,
        None,
        start,
        first,
        own_usage=usage,
        first_text_s=first,
        prompt_end=Piece(None, text, text),
    )


def test_a_prompt_that_was_still_being_computed():
    root = Call("program", "p")
    root.children = [request("a", "x " * 50, 0.0, 2.0, 50, 0), request("b", "x " * 60, 1.0, 3.0, 60, 0)]
    miss = Misses(root).why[root.children[1]]
    assert (miss.reason, miss.overlapping) == ("lost", True)
    assert str(miss).endswith("it was not computed yet when this request began.")


def test_who_evicted_is_told_where_it_is_known():
    taker = "judge 00112233445566778899aabbccddeeff"
    root = Call("program", "p")
    root.children = [
        request("a", "x " * 50, 0.0, 1.0, 50, 0),
        request("b", "x " * 60, 2.0, 3.0, 60, 0, evicted_tokens=50, evicted_by=taker),
        request("c", "y " * 60, 3.0, 4.0, 60, 0, evicted_tokens=20, evicted_by="judge 8"),
    ]
    _, lost, strange = (Misses(root).why[call] for call in root.children)
    assert str(lost) == (
        "Gen 'a' had computed more of this prompt than was found: "
        "50 tokens of it had been evicted by judge 00112233."
    )
    assert (lost.to_dict()["evicted_tokens"], lost.to_dict()["evicted_by"]) == (50, taker)
    assert str(strange).endswith("begins like this one. 20 tokens of it had been evicted by judge 8.")


def test_a_prompt_of_which_only_the_last_token_was_computed_is_no_miss():
    root = Call("program", "p")
    root.children = [request("a", "x " * 50, 0.0, 1.0, 50, 49)]
    assert Misses(root).why == {}


def test_the_tree_as_data_says_why():
    program = program_of("one two three" + rm.gen("x"))
    data = json.loads(json.dumps(program.run(backend=rm.ScriptedBackend(["a"])).trace.to_dict()))
    assert data["miss"] is None
    assert data["children"][0]["miss"]["reason"] == "first"
    assert data["children"][0]["miss"]["evicted_by"] is None


def shared(one: str, other: str) -> int:
    """Length of the common prefix."""
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def test_the_nearest_of_many_is_found():
    """Each of a thousand requests is compared with its neighbours alone."""
    root = Call("program", "p")
    prompts = [
        f"{'long shared text ' * 50}{index % 10} document {index * 7919 % 1000} end" for index in range(1000)
    ]
    root.children = [request(str(i), text, float(i), i + 0.5, 200, 0) for i, text in enumerate(prompts)]
    why = Misses(root).why
    for index in (1, 10, 500, 999):
        best = max(shared(prompts[index], earlier) for earlier in prompts[:index])
        assert why[root.children[index]].shared_chars == best


# --- tokens -------------------------------------------------------------------------------------


def chunk(text, ids, forced=(), total=None, logprobs=None):
    usage = None if total is None else Usage(forced_tokens=total)
    return TextChunk(rid="r", text=text, ids=ids, forced=forced, usage=usage, logprobs=logprobs)


def test_each_chunk_of_one_token_is_a_span():
    tokens = tokens_of([chunk("a", (1,)), chunk(" b", (2,), (0,)), chunk("", (3,)), chunk("", (), total=1)])
    assert tokens.ids == (1, 2, 3)
    assert list(tokens.spans("a b", {})) == [Span("a", (1,), 0), Span(" b", (2,), 1), Span("", (3,), 0)]


def test_what_is_forced_is_told_of_each_token():
    tokens = tokens_of([chunk("a", (1,)), chunk("bcd", (2, 3, 4), (0, 2)), chunk("e", (5,), total=2)])
    assert list(tokens.spans("abcde", {})) == [
        Span("a", (1,), 0),
        Span("bcd", (2, 3, 4), 2),
        Span("e", (5,), 0),
    ]
    known = {2: "b", 3: "c", 4: "d"}
    assert [span.forced for span in tokens.spans("abcde", known)] == [0, 1, 0, 1, 0]


def test_which_tokens_were_forced_is_not_guessed():
    tokens = tokens_of([chunk("a", (1,)), chunk("bcd", (2, 3, 4)), chunk("e", (5,), total=1)])
    assert [span.forced for span in tokens.spans("abcde", {})] == [None, None, None]


def test_log_probabilities_take_chunks_apart():
    scores = TokenLogprobs(
        ids=(2, 3),
        logprobs=(-0.5, -1.0),
        texts=("b", "c"),
        top=(((2, -0.5), (9, -2.0)), ((3, -1.0),)),
        top_texts=(("b", "z"), ("c",)),
    )
    tokens = tokens_of([chunk("bc", (2, 3), total=0, logprobs=scores)])
    assert list(tokens.spans("bc", {})) == [
        Span("b", (2,), 0, -0.5, (("b", -0.5), ("z", -2.0))),
        Span("c", (3,), 0, -1.0, (("c", -1.0),)),
    ]


def test_a_token_costs_a_few_bytes():
    tokens = tokens_of([chunk("word", (index,), (0,)) for index in range(1000)])
    assert isinstance(tokens, Tokens)
    kept = (tokens.counts, tokens.chars, tokens.forced)
    assert {type(part) for part in kept} == {array}
    assert sum(len(part) * part.itemsize for part in kept) == 12_000


@pytest.mark.parametrize(
    ("user", "end", "assistant"),
    [("<|im_start|>user\n", "<|im_end|>", "\n"), ("<｜User｜>", "<｜end▁of▁sentence｜>", "<｜Assistant｜>")],
)
def test_neither_the_border_nor_the_first_word_cuts_a_special_token(user, end, assistant):
    text = f"{user}Where is it?{end}{assistant}"
    root = Call("program", "p")
    root.children = [request("a", f"{user}Where is it?", 0.0, 0.5, 6, 0)]
    root.children += [request("b", text, float(cached), cached + 0.5, 20, cached) for cached in range(1, 20)]
    misses = Misses(root)
    assert misses.why[root.children[1]].token == end
    places = {misses.cached[call].chars for call in root.children}
    assert len(places) > 5
    for token in re.finditer(r"<[^>]+>", text):
        assert not places & set(range(token.start() + 1, token.end()))
