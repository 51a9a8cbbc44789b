"""Names on the hub, by a local server that speaks its API: formats, revisions, tokens, broken connections."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from ramify.errors import EngineError, InvalidRequest, NotFound, Unauthorized
from ramify.runtime.inspect import resolve
from ramify.runtime.model.hub.names import HubName, by_preference, named, parsed, quants_of

from ..hub_server import COMMIT, HubServer, hub_server, use_hub
from .checkpoints import Case, build
from .gguf_files import write_gguf
from .test_resolve import save_tokenizer

SPLIT = ("big/tiny-Q8_0-00001-of-00002.gguf", "big/tiny-Q8_0-00002-of-00002.gguf")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(build(Case("llama", "llama")), path, "llama")
    return path.read_bytes()


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with hub_server() as hub:
        yield hub


@pytest.fixture
def hub(server: HubServer, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The server with one repository of GGUF files, empty caches, and a conversion of tokenizers that takes
    no time."""
    use_hub(monkeypatch, server.url, tmp_path)
    save_tokenizer(tmp_path / "tokenizer")
    monkeypatch.setattr(resolve, "tokenizer_of", lambda path: tmp_path / "tokenizer")
    server.repositories = {
        "someone/tiny-GGUF": {
            "README.md": b"A model.",
            "config.json": b"{}",
            "tiny.Q4_K_M.gguf": gguf,
            "tiny.q3_k_s.gguf": gguf[:-32],
            "mmproj-tiny-F16.gguf": b"a vision tower",
            **dict.fromkeys(SPLIT, gguf),
        }
    }
    server.gated, server.breaks, server.corrupted = {}, {}, set()
    server.asked.clear()
    return server


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("org/repo", HubName("org/repo")),
        ("org/repo:q4_k_m", HubName("org/repo", quant="q4_k_m")),
        ("hf.co/org/repo:Q4_K_M", HubName("org/repo", quant="Q4_K_M")),
        ("https://huggingface.co/org/repo", HubName("org/repo")),
        ("org/repo@v1.0:UD-Q2_K_XL", HubName("org/repo", "v1.0", "UD-Q2_K_XL")),
        ("org/repo@refs/pr/1", HubName("org/repo", "refs/pr/1")),
        ("gpt2", HubName("gpt2")),
        ("a/b/c", None),
        ("./a", None),
        ("org/repo:", None),
    ],
)
def test_names(name: str, meaning: HubName | None) -> None:
    assert parsed(name) == meaning


def test_formats_by_the_names_of_files_and_their_order() -> None:
    sizes = {
        "m-Q4_K_M.gguf": 40,
        "m.Q3_K_M.gguf": 30,
        "m-iq2_xxs.gguf": 20,
        "UD/m-UD-Q4_K_XL-00001-of-00002.gguf": 20,
        "UD/m-UD-Q4_K_XL-00002-of-00002.gguf": 24,
        "m-Q6_K.gguf": 60,
        "m-fp16.gguf": 160,
        "m-mxfp4.gguf": 41,
        "m.gguf": 99,
        "m-Q8_0-00001-of-00003.gguf": 1,  # the others are missing
        "mmproj-m-F16.gguf": 2,
        "m.imatrix.gguf": 3,
        "model.safetensors": 4,
    }
    quants = quants_of(sizes)
    labels = [quant.label for quant in by_preference(quants)]
    assert labels == ["Q4_K_M", "UD-Q4_K_XL", "MXFP4", "Q3_K_M", "IQ2_XXS", "Q6_K", "FP16", "m"]
    assert named(quants, "ud-q4_k_xl", "x").size == 44
    assert named(quants, "m.gguf", "x").files == ("m.gguf",)


def test_a_format_is_fetched_whatever_its_case_and_found_again_without_the_hub(
    hub: HubServer, gguf: bytes
) -> None:
    files = resolve.resolve("hf.co/someone/tiny-GGUF:Q3_K_S", progress=False)
    assert files.weights.read_bytes() == gguf[:-32]
    assert files.name == "hf.co/someone/tiny-GGUF:Q3_K_S"
    assert not any("Q4_K_M" in asked for asked in hub.asked)
    hub.asked.clear()
    assert resolve.resolve("someone/tiny-GGUF:q3_k_s", download=False).weights == files.weights
    assert resolve.resolve("someone/tiny-GGUF:tiny.q3_k_s.gguf").weights == files.weights
    assert not hub.asked
    with pytest.raises(
        NotFound, match="downloads are switched off; the Hugging Face cache holds no Q4_K_M of it"
    ):
        resolve.resolve("someone/tiny-GGUF:Q4_K_M", download=False)


def test_a_split_model_comes_whole(hub: HubServer, gguf: bytes) -> None:
    first = resolve.resolve("someone/tiny-GGUF:Q8_0", progress=False).weights
    assert first.name == "tiny-Q8_0-00001-of-00002.gguf"
    assert [path.read_bytes() for path in sorted(first.parent.iterdir())] == [gguf, gguf]


def test_an_unknown_format_lists_those_there_are(hub: HubServer) -> None:
    listed = r"no model in Q5_K_M\. It has Q3_K_S \(.*, Q4_K_M \(.*, Q8_0 \(.*Name one of them: .*:Q3_K_S"
    with pytest.raises(NotFound, match=listed):
        resolve.resolve("someone/tiny-GGUF:Q5_K_M")
    hub.repositories["someone/tiny-GGUF"]["other.Q4_K_M.gguf"] = b""
    both = r"2 models in Q4_K_M: .*Name a file: someone/tiny-GGUF:other\.Q4_K_M\.gguf"
    with pytest.raises(InvalidRequest, match=both):
        resolve.resolve("someone/tiny-GGUF:Q4_K_M")


def test_a_broken_connection_is_resumed_where_it_broke(
    hub: HubServer, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100)
    hub.breaks["tiny.Q4_K_M.gguf"] = 1000
    assert resolve.resolve("someone/tiny-GGUF:Q4_K_M", progress=False).weights.read_bytes() == gguf
    assert any(asked.endswith("bytes=1000-") for asked in hub.asked)


def test_a_file_with_another_hash_is_removed(hub: HubServer, tmp_path: Path, gguf: bytes) -> None:
    hub.corrupted.add("tiny.Q4_K_M.gguf")
    with pytest.raises(
        EngineError, match=r"SHA-256 [0-9a-f]{64}; \d+ bytes and [0-9a-f]{64} were expected"
    ) as caught:
        resolve.resolve("someone/tiny-GGUF:Q4_K_M", progress=False)
    assert caught.value.transient
    assert not [*(tmp_path / "hub").rglob("*.gguf"), *(tmp_path / "hub").rglob("blobs/*")]
    hub.corrupted.clear()
    assert resolve.resolve("someone/tiny-GGUF:Q4_K_M", progress=False).weights.read_bytes() == gguf


def test_a_folder_of_safetensors_is_fetched_at_a_revision(hub: HubServer, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "made")
    tokenizer = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    weights = {"config.json": b"{}", "model.safetensors": b"weights", "consolidated.safetensors": b"again"}
    hub.repositories["someone/tiny"] = {**tokenizer, **weights, "decider_config.json": b"{}"}
    files = resolve.resolve("someone/tiny@v1", progress=False)
    assert sorted(path.name for path in files.weights.iterdir()) == sorted(
        {*tokenizer, "config.json", "decider_config.json", "model.safetensors"}
    )
    assert resolve.resolve("someone/tiny@v1", download=False) == files
    assert resolve.resolve(f"someone/tiny@{COMMIT}", download=False).weights == files.weights
    with pytest.raises(NotFound, match="no revision v2"):
        resolve.resolve("someone/tiny@v2")


def test_the_layout_of_questions_comes_with_a_gguf_file(hub: HubServer) -> None:
    hub.repositories["someone/tiny-GGUF"]["decider_config.json"] = b"{}"
    weights = resolve.resolve("someone/tiny-GGUF:Q4_K_M", progress=False).weights
    assert weights.with_name("decider_config.json").is_file()


def test_what_the_hub_refuses_is_said(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="There is no someone/other on the Hugging Face hub, or it is private"):
        resolve.resolve("someone/other")
    hub.gated["someone/tiny-GGUF"] = "hf_secret"
    with pytest.raises(Unauthorized, match=r"is gated.*Ask for access.*HF_TOKEN"):
        resolve.resolve("someone/tiny-GGUF:Q4_K_M")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert resolve.resolve("someone/tiny-GGUF:Q4_K_M", progress=False).weights.is_file()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFound, match="HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked"):
        resolve.resolve("someone/tiny-GGUF:Q3_K_S")


def test_a_hub_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    use_hub(monkeypatch, f"http://127.0.0.1:{port}", tmp_path)
    refused = f"http://127.0.0.1:{port} cannot be reached: 127.0.0.1:{port} refuses connections. A mirror is"
    with pytest.raises(NotFound, match=re.escape(refused)):
        resolve.resolve("someone/other")


def test_the_environment_names_another_hub(hub: HubServer, tmp_path: Path) -> None:
    code = (
        "import sys; from ramify.runtime.inspect import resolve; resolve.tokenizer_of = lambda path: path; "
    )
    code += "print(resolve.resolve(sys.argv[1]).weights)"
    hub.gated["someone/tiny-GGUF"] = "hf_other"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_other"}
    command = [sys.executable, "-c", code, "someone/tiny-GGUF:Q3_K_S"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("/tiny.q3_k_s.gguf"), done.stderr
    assert str(tmp_path / "hub") in done.stdout
    assert "torch" not in done.stderr
