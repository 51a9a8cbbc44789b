"""Conversion of prompts to ids: segments, chats, and refused prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ramify.engine_messages import ChoiceTokens, Detokenize, Tokenize
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatMessage, Choices, Generate, Preamble, ProgramHint, Thinking, ToolCall
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from ramify.runtime.processes.tokenizer import PromptTokenizer
from ramify.sampling_params import SamplingParams
from ramify.tool_calls.grammar import Tool, tools_json
from tests.model.tool_templates import LLAMA3, MISTRAL, QWEN


@pytest.fixture(scope="module")
def prompts(tiny_folder: Path) -> PromptTokenizer:
    return PromptTokenizer(load_tokenizer(tiny_folder))


def ids(prompts: PromptTokenizer, **fields: Any) -> list[int]:
    return list(prompts.submit(Generate(rid="r", **fields)).ids)


def decode(tokens: list[int], folder: Path) -> str:
    return str(load_tokenizer(folder).decode(tokens))


def test_segments_keep_ids_and_join_texts(prompts: PromptTokenizer, tiny_folder: Path) -> None:
    whole = ids(prompts, prompt=("héllo", " world"))
    assert whole == ids(prompts, prompt=("héllo world",))
    assert decode(whole, tiny_folder) == "héllo world"
    assert ids(prompts, prompt=("ab", (7, 300), "c")) == [
        *ids(prompts, prompt=("ab",)),
        7,
        300,
        *ids(prompts, prompt=("c",)),
    ]


def test_ids_on_request_are_those_of_the_generation(prompts: PromptTokenizer) -> None:
    chat = Generate(rid="c", chat=(ChatMessage(role="user", content="hi"),))
    text = Generate(rid="t", prompt=("héllo world",))
    found = prompts.tokenize(Tokenize(rid="r", prompts=(chat, text), special=False))
    for request, one in zip((chat, text), found.prompts, strict=True):
        assert one.ids == prompts.submit(request).ids
        assert len(one.tokens) == len(one.ids)
    ids = tuple(one.ids for one in found.prompts)
    back = prompts.detokenize(Detokenize(rid="r", ids=(*ids, ()), skip_special_tokens=True))
    assert back.whole == ("<|user|>hi<|end|><|assistant|>", "héllo world", "")
    assert back.text[1:] == ("héllo world", "")


def test_the_generation_prompt_can_be_left_out(prompts: PromptTokenizer, tiny_folder: Path) -> None:
    kwargs = '{"add_generation_prompt": false}'
    chat = (ChatMessage(role="user", content="hi"),)
    assert decode(ids(prompts, chat=chat, template_kwargs=kwargs), tiny_folder) == "<|user|>hi<|end|>"


def test_a_last_message_of_the_assistant_can_be_continued(prompts: PromptTokenizer) -> None:
    turns = (ChatMessage(role="user", content="hi"), ChatMessage(role="assistant", content="The end"))
    options = '{"add_generation_prompt":false,"continue_final_message":true}'
    whole, continued = (
        prompts.submit(Generate(rid="r", chat=turns, template_kwargs=one)) for one in ("", options)
    )
    assert (whole.open_end, continued.open_end) == (False, True)
    texts = prompts.detokenize(Detokenize(rid="r", ids=(whole.ids, continued.ids), skip_special_tokens=False))
    assert texts.whole[1].endswith("The end")
    assert texts.whole[0].startswith(texts.whole[1])


def test_chat_goes_through_the_template(prompts: PromptTokenizer, tiny_folder: Path) -> None:
    chat = (ChatMessage(role="user", content="hi"),)
    assert decode(ids(prompts, chat=chat), tiny_folder) == "<|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize("prompt", [(), ("",), ((),), ("", ())])
def test_an_empty_prompt_is_refused(prompts: PromptTokenizer, prompt: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest, match="empty") as refusal:
        ids(prompts, prompt=prompt)
    assert refusal.value.field == "prompt"


def test_a_template_that_raises_is_a_bad_request(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(InvalidRequest, match="no such role"):
        ids(PromptTokenizer(tokenizer), chat=(ChatMessage(role="user", content="x"),))


def test_a_model_without_template_takes_no_chat(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.chat_template = None
    with pytest.raises(InvalidRequest, match="no chat template"):
        ids(PromptTokenizer(tokenizer), chat=(ChatMessage(role="user", content="x"),))


def test_a_spelled_beginning_token_is_not_doubled(tiny_folder: Path) -> None:
    class WithBos:
        bos_token_id = 1
        chat_template = None

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            spelled = [1] if text.startswith("<s>") else []
            return [1] * add_special_tokens + spelled + [9] * len(text.removeprefix("<s>"))

    assert ids(PromptTokenizer(WithBos()), prompt=("<s>ab",)) == [1, 9, 9]
    assert ids(PromptTokenizer(WithBos()), prompt=("ab",)) == [1, 9, 9]
    assert ids(PromptTokenizer(WithBos()), prompt=((5,), "a")) == [5, 9]


TOOLS = tools_json([Tool(name="look", parameters='{"type": "object"}', description="Looks.")])
CALL = ToolCall(id="abcdefghi", name="look", arguments='{"at": [1.50, "ü"]}')
CALLED = (
    ChatMessage(role="user", content="hi"),
    ChatMessage(role="assistant", content="", tool_calls=(CALL,)),
    ChatMessage(role="tool", content="seen", tool_call_id="abcdefghi", name="look"),
)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (QWEN, '<tool_call>\n{"name": "look", "arguments": {"at": [1.5, "ü"]}}\n</tool_call>'),
        (LLAMA3, '{"name": "look", "parameters": {"at": [1.5, "ü"]}}'),
        (MISTRAL, '[TOOL_CALLS][{"name": "look", "arguments": {"at": [1.5, "ü"]}, "id": "abcdefghi"}]'),
    ],
    ids=["hermes", "llama3", "mistral"],
)
def test_tools_go_through_the_template(tiny_folder: Path, template: str, shown: str) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.chat_template = template
    prompts = PromptTokenizer(tokenizer)
    text = decode(ids(prompts, chat=CALLED, tools=TOOLS), tiny_folder)
    assert shown in text
    assert "seen" in text
    assert "Looks." not in decode(ids(prompts, chat=CALLED[:1]), tiny_folder)
    assert "Looks." in decode(ids(prompts, chat=CALLED[:1], tools=TOOLS), tiny_folder)


def test_variables_go_to_the_template(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.chat_template = QWEN
    chat = CALLED[:1]
    plain = decode(ids(PromptTokenizer(tokenizer), chat=chat), tiny_folder)
    silent = decode(
        ids(PromptTokenizer(tokenizer), chat=chat, template_kwargs='{"enable_thinking": false}'), tiny_folder
    )
    assert silent == plain + "<think>\n\n</think>\n\n"


def test_the_prompt_ends_in_the_start_of_its_preamble_once(
    prompts: PromptTokenizer, tiny_folder: Path
) -> None:
    thinking = Preamble(start="<think>", end="</think>")
    submit = prompts.submit(Generate(rid="r", prompt=("hi ",), preambles=(thinking,)))
    assert decode(list(submit.ids), tiny_folder) == "hi <think>"
    assert submit.preambles[0].end_ids == tuple(ids(prompts, prompt=("</think>",)))
    assert submit.sampling.skip_special_tokens
    for written in ("hi <think>", "hi <think>\n"):
        assert ids(prompts, prompt=(written,), preambles=(thinking,)) == ids(prompts, prompt=(written,))
    chat = (ChatMessage(role="user", content="hi"),)
    assert decode(ids(prompts, chat=chat, preambles=(thinking,)), tiny_folder).endswith(
        "<|assistant|><think>"
    )


def test_a_control_token_ends_a_preamble_where_it_stands_alone(prompts: PromptTokenizer) -> None:
    submit = prompts.submit(Generate(rid="r", prompt=("hi",), preambles=(Preamble(end="<|system|>"),)))
    assert len(submit.preambles[0].end_ids) == 1
    assert not submit.sampling.skip_special_tokens, "the end has to show in the text"
    with pytest.raises(InvalidRequest, match="control token"):
        prompts.submit(Generate(rid="r", prompt=("hi",), preambles=(Preamble(end="a<|system|>"),)))


def test_thinking_is_for_backends_of_messages(prompts: PromptTokenizer) -> None:
    with pytest.raises(UnsupportedField, match="preambles, not thinking"):
        prompts.submit(Generate(rid="r", prompt=("hi",), thinking=Thinking()))


@pytest.mark.parametrize("wrong", [Preamble(end=""), Preamble(end="x", apart=True)])
def test_a_preamble_that_lacks_something_is_refused(prompts: PromptTokenizer, wrong: Preamble) -> None:
    with pytest.raises(InvalidRequest, match="lacks its end, or is apart") as caught:
        prompts.submit(Generate(rid="r", prompt=("hi",), preambles=(wrong,)))
    assert caught.value.field == "preambles"


def test_no_text_is_tokenised_twice(tiny_folder: Path) -> None:
    """Each call of a program repeats the texts between its earlier outputs."""
    tokenizer = load_tokenizer(tiny_folder)
    encoded: list[str] = []
    encode = tokenizer.encode

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def encode(self, text: str, **options: Any) -> Any:
            encoded.append(text)
            return encode(text, **options)

    prompts = PromptTokenizer(Counting())
    prompt: tuple[Any, ...] = ("A system turn, and the first question of the user.",)
    fresh = PromptTokenizer(tokenizer)
    for turn in range(20):
        assert ids(prompts, prompt=prompt) == ids(fresh, prompt=prompt)
        prompt = (*prompt, (7, 8), f"The end of answer {turn}, and the next question of the user.")
    assert len(encoded) == len(set(encoded)) == 20


def test_the_ids_that_are_kept_are_bounded(tiny_folder: Path) -> None:
    prompts = PromptTokenizer(load_tokenizer(tiny_folder), cached_characters=100)
    texts = [f"{number}" * 40 for number in range(5)]
    for text in (*texts, texts[3], texts[0]):
        assert len(ids(prompts, prompt=(text,))) == 40
    assert [text for text, *_ in prompts._cache] == [texts[3], texts[0]]
    assert prompts._cached_characters == 80


def test_scopes_do_not_find_the_texts_of_each_other(tiny_folder: Path) -> None:
    """A cached text takes less time, which would tell whether another scope has sent it."""
    tokenizer, encoded = load_tokenizer(tiny_folder), []
    prompts = PromptTokenizer(tokenizer)
    encode = tokenizer.encode
    tokenizer.encode = lambda text, **options: encoded.append(text) or encode(text, **options)
    text = "seven lines " * 9
    ids(prompts, prompt=(text,), scope="a")
    for scope, count in (("a", 0), ("b", 1), ("b", 0), ("", 1), ("a", 0)):
        encoded.clear()
        ids(prompts, prompt=(text,), scope=scope)
        assert encoded.count(text) == count
    encoded.clear()
    asked = Generate(rid="t", prompt=(text,), scope="c")
    prompts.tokenize(Tokenize(rid="t", prompts=(asked, asked), special=True))
    assert encoded.count(text) == 1


class Words:
    """A tokenizer whose tokens are words, each with the space before it."""

    bos_token_id = None
    chat_template = None

    def __init__(self, pattern: str = r" ?\w+|\s|.") -> None:
        self.pattern = pattern
        self.known: dict[str, int] = {}
        self.characters = 0
        """Number of characters tokenised so far."""

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        self.characters += len(text)
        found = list(re.finditer(self.pattern, text))
        return {
            "input_ids": [self.known.setdefault(one.group(), len(self.known)) for one in found],
            "offset_mapping": [one.span() for one in found],
        }

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self(text)["input_ids"]
        return ids

    def ids(self, *texts: str) -> tuple[int, ...]:
        return tuple(self.known[text] for text in texts)


def scored(tokenizer: Any, prompt: tuple[Any, ...], *texts: str, exact: bool = False) -> list[ChoiceTokens]:
    sampling = SamplingParams(max_tokens=0, token_healing=not exact)
    request = Generate(rid="r", prompt=prompt, choices=Choices(texts=texts), sampling=sampling)
    return list(PromptTokenizer(tokenizer).submit(request).choices)


def test_where_a_choice_begins() -> None:
    words = Words()
    assert scored(words, ("Say: ",), "yes", "no way") == [
        ChoiceTokens(shared=2, ids=words.ids(" yes")),  # of "Say", ":" and " "
        ChoiceTokens(shared=2, ids=words.ids(" no", " way")),
    ]
    assert scored(words, ("Say",), " yes", "s yes") == [
        ChoiceTokens(shared=1, ids=words.ids(" yes")),
        ChoiceTokens(shared=0, ids=words.ids("Says", " yes")),
    ]
    # Text that follows does not change a prompt that ends on a token.
    assert scored(words, ("Say",), "s", exact=True) == [ChoiceTokens(shared=1, ids=words.ids("s"))]
    assert scored(words, ("Say", (7, 8)), "s") == [ChoiceTokens(shared=3, ids=words.ids("s"))]
    assert scored(words, ((7, 8), "Say"), "s") == [ChoiceTokens(shared=2, ids=words.ids("Says"))]
    assert scored(words, (), "so it is") == [ChoiceTokens(shared=0, ids=words.ids("so", " it", " is"))]


def test_tokens_that_spell_the_prompt_alone_are_dropped() -> None:
    letters = Words(r"ab(?!c)|bc|.")  # "ab" is two tokens where a "c" follows
    assert scored(letters, ("xab",), "cd", "d") == [
        ChoiceTokens(shared=1, ids=letters.ids("a", "bc", "d"), dropped=1),
        ChoiceTokens(shared=2, ids=letters.ids("d")),
    ]


def test_of_a_long_prompt_the_end_is_tokenised_with_each_choice() -> None:
    words = Words()
    prompt = "It was a dark and stormy night. " * 200 + "Was it? "
    choices = [f"yes {number}" for number in range(50)]
    short = scored(words, (prompt,), *choices)
    assert words.characters < 5 * len(prompt)
    length = len(words.encode(prompt, False))
    assert short == [
        ChoiceTokens(shared=length - 1, ids=words.ids(" yes", f" {number}")) for number in range(50)
    ]


def test_places_where_later_prompts_part_from_this_one(prompts: PromptTokenizer) -> None:
    """A fork's position is one token before the place, as a token may span the place."""

    def forks(*parts: tuple[int, int], **fields: Any) -> tuple[int, ...]:
        hint = ProgramHint(program="p", parts=parts)
        return prompts.submit(Generate(rid="r", hint=hint, **fields)).forks

    segments = ("hello world", (1, 2, 3), "the end")
    assert forks(prompt=segments) == ()
    assert forks((0, 5), (1, 0), (2, 0), (2, 3), (2, 7), prompt=segments) == (4, 10, 13, 16, 20)
    assert forks((0, 0), (9, 9), prompt=segments) == (20,), "nothing is before the first place"
    # A chat goes on behind its last message: the next prompt has an answer there, perhaps without thoughts.
    chat = (ChatMessage(role="user", content=" What is it? "),)
    whole = ids(prompts, chat=chat)
    assert prompts.submit(Generate(rid="r", chat=chat)).forks == (len(whole) - 4,)
