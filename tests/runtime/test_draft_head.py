"""Draft heads: their drafts equal those of transformers' layers, and outputs are the same without them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.config import EngineConfig
from ramify.runtime.engine.engine import Engine
from ramify.runtime.executor.kv_pool import page_bytes
from ramify.runtime.executor.memory import with_defaults
from ramify.runtime.executor.runner import Runner
from ramify.runtime.inspect.machine import Machine
from ramify.runtime.inspect.report import inspected
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import load_model, read_shape
from ramify.runtime.model.shape.config import ModelConfig
from ramify.runtime.model.shape.heads import HeadConfig
from ramify.runtime.processes.worker_process import Orders
from ramify.runtime.scheduler import process
from ramify.runtime.scheduler.requests.limits import Tuning
from ramify.runtime.scheduler.speculation import drafter
from ramify.runtime.scheduler.speculation.checks import read_draft, speculates
from tests.model import hybrids
from tests.runtime.head_files import Reference, write_eagle3, write_glm, write_qwen
from tests.runtime.local import LocalScheduler
from tests.runtime.test_draft_model import Forks
from tests.runtime.test_overlap import told
from tests.runtime.test_speculation import Twice

EAGER = Tuning(least_gain=0.0)
"""Tuning that counts every draft token as worth its row."""


class Case:
    def __init__(self, model: Path, draft: Path, reference: Reference) -> None:
        self.model, self.draft, self.reference = model, draft, reference

    def local(self, **options: Any) -> LocalScheduler:
        options = {"speculation": True, "tuning": EAGER, **options}
        return LocalScheduler(self.model, draft=self.draft, **options)


def _glm(folder: Path) -> Case:
    return Case(folder, folder, write_glm(folder))


def _eagle3(folder: Path, **options: Any) -> Case:
    model, head = folder / "model", folder / "head"
    return Case(model, head, write_eagle3(model, head, **options))


CASES: dict[str, Callable[[Path], Case]] = {
    "glm": _glm,
    "eagle3": _eagle3,
    "qwen3_next": lambda folder: Case(folder, folder, write_qwen(folder, hybrids.NEXT)),
    "qwen3_5": lambda folder: Case(folder, folder, write_qwen(folder, hybrids.DENSE)),
    "eagle3-named": lambda folder: _eagle3(folder, part=False, first=True),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return CASES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def no_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter.Drafter, "_look_up", lambda *_: False)


@pytest.mark.parametrize(
    "options",
    [{}, {"page_size": 4, "chunk_tokens": 16}, {"deterministic": True}, {"attention_backend": "torch"}],
    ids=["plain", "chunks", "packed", "torch"],
)
def test_drafts_are_those_of_transformers_layers(case: Case, options: Any) -> None:
    """Of each step, the first drafts of a chain. The second prompt begins in the tree, where the head's last
    row was computed with the next token of the first prompt."""
    local = case.local(**options)
    prompt = [*b"a prompt of some length, which takes several pages and chunks of a prefill"]
    compared: list[list[int]] = [[], []]
    for number, ids in enumerate((prompt, [*prompt[:50], *b"!! and another end"])):
        rid = local.submit(ids, max_tokens=9, ignore_eos=True)
        while local.scheduler.busy:
            local.step()
            request = local.scheduler.requests.open.get(rid)
            draft = request and request.speculation.model_draft
            if request is not None and draft:
                before, first = request.ids[: draft.position].tolist(), draft.tokens[:3]
                other = {50: prompt[50]} if request.stats.cached_tokens == 50 else {}
                assert first == case.reference.drafts(before, len(first), other)
                compared[number].append(draft.position)
    assert all(len(set(steps)) > 3 for steps in compared), "after rejected drafts too"


def _silence(tensors: dict[str, torch.Tensor], at: str) -> None:
    """Let the layers whose names begin with `at` add nothing to the residual stream."""
    for name, tensor in tensors.items():
        if name.startswith(at) and ("o_proj" in name or "down_proj" in name):
            tensor.zero_()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model whose head is right by construction: the layers of both add nothing, so the next token depends
    on the last token's embedding alone, which the head reads too."""
    case = _glm(tmp_path_factory.mktemp("right"))
    path = case.model / "model.safetensors"
    tensors = load_file(path)
    _silence(tensors, "model.layers.")
    head, size = "model.layers.2.", 64
    tensors[f"{head}eh_proj.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    tensors[f"{head}enorm.weight"] = torch.ones(size)
    tensors[f"{head}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path)
    return case


@pytest.mark.parametrize(
    "options",
    [{}, {"page_size": 4, "num_pages": 40, "chunk_tokens": 16}, {"overlap": True}],
    ids=["plain", "short-of-pages", "overlap"],
)
def test_a_right_head_saves_steps(right: Case, options: Any) -> None:
    """Requests with common prefixes, greedy and sampled."""
    without = Forks(right.model, None, **options)
    expected = without.run(waves=2)
    forks = Forks(right.model, right.draft, tuning=EAGER, **options)
    assert forks.run(waves=2) == expected
    counters = forks.counters
    assert counters.draft_tokens == counters.model_draft_tokens > 100
    # The head's norms round twice, which changes the choice of some drawn tokens.
    assert counters.accepted_tokens > 0.95 * counters.draft_tokens
    assert counters.steps < 0.8 * without.counters.steps
    if "num_pages" in options:
        assert counters.retractions > 0


def test_a_right_head_is_used_where_its_time_pays(right: Case) -> None:
    """Each call of the clock adds 1 ms: a pass of the head takes 1 ms, and a step takes several."""
    forks = Forks(right.model, right.draft)
    forks.run()
    assert forks.counters.model_accepted_tokens > 50


def test_a_wrong_head_stops(case: Case) -> None:
    forks = Forks(case.model, case.draft)
    forks.run()
    counters = forks.counters
    before = dataclasses.replace(counters, clock=lambda: 0.0)
    assert before.draft_model_tokens > 0
    assert before.model_draft_tokens < 100
    forks.run(waves=2)
    assert counters.model_draft_tokens - before.model_draft_tokens < 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"longest": 24}, {"page_size": 4, "num_pages": 40, "chunk_tokens": 16, "longest": 36}],
    ids=["plain", "short-of-pages"],
)
def test_the_same_tokens(case: Case, monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    """Requests of every kind: grammars, forced text, log-probabilities, penalties, healing; with lookups."""
    monkeypatch.undo()
    expected = Twice(case.model, speculation=False, **options).run()
    load = Twice(case.model, speculation=True, tuning=EAGER, draft=case.draft, **options)
    assert [told(result) for result in load.run()] == [told(result) for result in expected]
    counters = load.local.scheduler.counters
    assert counters.accepted_tokens > counters.model_accepted_tokens, "prompt lookup drafts too"
    assert counters.model_draft_tokens > 20, "fewer with states, whose slots waiting requests take first"
    assert load.local.cache.counts().in_use == 0


def test_hidden_states_without_those_that_the_head_reads(case: Case) -> None:
    """Embeddings and log-probabilities of prompts are the same beside a head."""
    prompt = [*b"some prompt"]
    found = []
    for local in (case.local(deterministic=True), LocalScheduler(case.model, deterministic=True)):
        rids = [local.submit(prompt, max_tokens=0, pooling="mean")]
        rids.append(local.submit(prompt, max_tokens=4, logprobs=2, prompt_logprobs_start=0))
        local.run()
        results = [local.results[rid] for rid in rids]
        found.append((results[0].embedding, results[1].logprobs, results[1].prompt_logprobs))
    assert len(found[0][0]) == 4 * case.reference.model.config.hidden_size
    assert found[0] == found[1]


def test_the_head_in_the_checkpoint_is_found(case: Case) -> None:
    shape, files = read_shape(case.model), ModelFiles("model", case.model, case.model)
    eagle3 = case.draft != case.model
    config = EngineConfig(draft_model="head" if eagle3 else None, speculation=True)
    found = read_draft(config, shape, files, ModelFiles("head", case.draft, case.draft) if eagle3 else None)
    assert isinstance(found, HeadConfig)
    assert (found.num_layers, found.behind, found.states) == (1, shape.depth, None)
    assert len(found.captures) == 3 * eagle3
    if not eagle3:
        options: tuple[dict[str, Any], ...] = (
            {"speculation": False},
            {"speculation": speculates(EngineConfig(), "cuda")},
            {"tensor_parallel": 2},
            {"load_format": "dummy"},
        )
        for each in options:
            config = EngineConfig(**{"speculation": True, **each})
            assert read_draft(config, shape, files, None) is None


def test_an_inspection_counts_the_head_where_it_is_loaded(case: Case) -> None:
    files = ModelFiles("model", case.model, case.model)

    def found(device: Literal["cpu", "cuda"], **options: Any) -> tuple[int, int]:
        seen = inspected(files, Machine(device, "a machine", 1 << 34, "bfloat16"), EngineConfig(**options))
        return seen.weight_bytes, seen.kv_bytes_per_token

    without = found("cpu", speculation=False)
    if case.draft != case.model:
        assert found("cpu") == without
        return
    shape = read_shape(case.model)
    assert isinstance(shape, ModelConfig)
    head = read_draft(EngineConfig(speculation=True), shape, files, None)
    assert isinstance(head, HeadConfig)
    weights, per_token = (ours - theirs for ours, theirs in zip(found("cpu"), without, strict=True))
    loaded = load_model(files, shape=head, dtype=torch.bfloat16)
    assert weights == 2 * sum(tensor.numel() for tensor in loaded.parameters())
    assert per_token == page_bytes(head, 1, torch.bfloat16)
    assert found("cuda", speculation=True)[1] == found("cpu")[1]
    assert found("cuda")[1] == without[1]


def _change(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Replace the tensor `name` in `folder` by `change` of it; None: leave it out."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    found = tensors.pop(name)
    if change is not None:
        tensors[name] = change(found)
    save_file(tensors, path)


def _start(case: Case) -> Runner | None:
    """The draft runner of an engine of `case`, as its process builds it."""
    asked = EngineConfig(num_pages=64, device="cpu", speculation=True, attention_backend="torch")
    config = with_defaults(asked, None)
    shape, folder = read_shape(case.model), str(case.model)
    draft = None if case.draft == case.model else str(case.draft)
    orders = Orders(
        sockets="",
        config=config,
        tokenizer=folder,
        weights=folder,
        model_name="model",
        draft_weights=draft,
        draft_tokenizer=draft,
    )
    head = read_draft(config, shape, *process._files_of(config, orders))
    assert head is not None
    return process._load(config, orders, shape, head)[1]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("enorm", None, r"lacks 1 of .*: model\.layers\.2\.enorm\.weight"),
        ("eh_proj", lambda tensor: tensor[:8].clone(), r"gives model\.layers\.2\.eh_proj\.weight shape"),
        ("hnorm", lambda tensor: tensor.to(torch.int8), r"holds model\.layers\.2\.hnorm\.weight as .*int8"),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_an_engine_starts_without_a_head_that_cannot_be_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, change: Any, reason: str
) -> None:
    case = _glm(tmp_path)
    _change(case.model, f"model.layers.2.{name}.weight", change)
    assert _start(case) is None
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(f"glm4_moe draft head .*{reason}.*--no-speculation", warning)


def test_the_log_says_what_the_head_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ramify")
    found = _start(_glm(tmp_path))
    assert found is not None
    size = sum(each.nbytes for each in found.model.parameters())
    assert f"takes {size} bytes; --no-speculation leaves it out" in caplog.text


def test_a_named_head_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    case = _eagle3(tmp_path)
    _change(case.draft, "fc.weight", None)
    with pytest.raises(InvalidRequest, match=r"lacks 1 of .*: fc\.weight"):
        _start(case)


@pytest.mark.parametrize(("place", "distance"), [(0, -1), (-1, 320)])
def test_a_head_that_names_tokens_out_of_range_is_refused(tmp_path: Path, place: int, distance: int) -> None:
    case = _eagle3(tmp_path)

    def change(d2t: torch.Tensor) -> torch.Tensor:
        d2t[place] = distance
        return d2t

    _change(case.draft, "d2t", change)
    with pytest.raises(InvalidRequest, match=r"d2t names tokens .* the model has 320 tokens") as refused:
        _start(case)
    assert refused.value.field == "draft_model"


def test_speculation_is_on_by_default_on_the_cpu_and_with_a_draft_model() -> None:
    assert speculates(EngineConfig(), "cpu")
    assert not speculates(EngineConfig(speculation=False), "cpu")
    assert not speculates(EngineConfig(), "cuda"), "a head that nobody asked for stays on the disk"
    assert speculates(EngineConfig(speculation=True), "cuda")
    assert speculates(EngineConfig(draft_model="head"), "cuda")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 128}, "a model whose hidden size is 128, and the model's is 64"),
        ({"vocab_size": 400}, "a model whose vocabulary is 400, and the model's is 320"),
        ({"draft_vocab_size": 321}, "has a draft_vocab_size of 321, and the model 320 tokens"),
        ({"draft_vocab_size": 0}, "has a draft_vocab_size of 0, and the model 320 tokens"),
        ({"num_hidden_layers": 2}, "has 2 layers, and 1 is supported"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, r"layers \[2, 3, 5\].* 5 layers"),
        ({"eagle_config": None}, r"reads the inputs of layers \[2, 2, 2\]"),
    ],
    ids=["hidden-size", "vocabulary", "wide", "empty", "layers", "captures", "default-captures"],
)
def test_an_unfit_head_is_refused_by_name(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    case = _eagle3(tmp_path)
    path = case.draft / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    config = EngineConfig(draft_model="some/head")
    files, head = (ModelFiles("", folder, folder) for folder in (case.model, case.draft))
    with pytest.raises(UnsupportedField, match=f"'some/head' .*{reason}") as refused:
        read_draft(config, read_shape(case.model), files, head)
    assert refused.value.field == "draft_model"
    assert resolve(str(case.draft)).weights == case.draft, "a head needs no tokenizer"


def test_a_head_is_no_model(tmp_path: Path) -> None:
    head = _eagle3(tmp_path).draft
    with pytest.raises(InvalidRequest, match=r"is an EAGLE-3 draft head.*--draft-model") as refused:
        Engine(model=str(head)).start()
    assert refused.value.field == "model"
