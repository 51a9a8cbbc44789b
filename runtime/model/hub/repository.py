"""A repository on the Hugging Face hub: its listing, its files, and the hub's refusals.

Uses `huggingface_hub`, so these environment variables take effect: HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE,
HF_HOME and HF_HUB_CACHE.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TypeVar
from urllib.parse import urlsplit

from ramify import cache
from ramify.credentials import without_credentials
from ramify.errors import EngineError, InvalidRequest, NotFound, RamifyError, Unauthorized
from ramify.runtime.model.gguf.header import size_of_header
from ramify.runtime.model.hub.names import HubName
from ramify.unreachable import is_connection, proxy_for, unreachable

HUB_TIMEOUT_S = 3.0
"""Seconds that the hub may take to say whether it has a model, name resolution included."""

BLOCK = 1 << 20
HEADER_BLOCK = 4 << 20
"""Bytes of a header that are fetched at a time. The header of a GGUF file with 150k tokens has about 6 MB."""

Result = TypeVar("Result")


class Unreachable(NotFound):
    """The hub does not answer, or must not be asked (HF_HUB_OFFLINE)."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. `digest` is the SHA-256 of a file stored with LFS, and git's blob id (a SHA-1)
    of any other file."""

    path: str
    size: int
    digest: str
    lfs: bool


@dataclass(frozen=True)
class Listing:
    """The files of a repository at the commit `commit`."""

    name: HubName
    commit: str
    files: dict[str, HubFile]


def listed(name: HubName) -> Listing:
    """The hub's listing of a repository. Raises `NotFound`, `Unauthorized` or `Unreachable`."""
    from huggingface_hub import HfApi

    with refusals(name):
        info = _within(
            HUB_TIMEOUT_S,
            lambda: HfApi().model_info(
                name.repository, revision=name.revision, files_metadata=True, timeout=HUB_TIMEOUT_S
            ),
        )
    files = {}
    for file in info.siblings or ():
        digest = file.lfs.sha256 if file.lfs else file.blob_id
        files[file.rfilename] = HubFile(file.rfilename, file.size or 0, digest or "", file.lfs is not None)
    return Listing(name, info.sha or "", files)


def cached(name: HubName) -> Path | None:
    """The revision's snapshot folder in the Hugging Face cache, perhaps incomplete; None if there is none."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE).expanduser()
    folder /= repo_folder_name(repo_id=name.repository, repo_type="model")
    commit = name.revision
    reference = folder / "refs" / name.revision
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8").strip()
    snapshot = folder / "snapshots" / commit
    return snapshot if re.fullmatch(r"[0-9a-f]{40}", commit) and snapshot.is_dir() else None


def cached_names() -> list[str]:
    """The repositories of which the Hugging Face cache holds any file."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE).expanduser()
    return [path.name.removeprefix("models--").replace("--", "/") for path in folder.glob("models--*")]


def fetched(listing: Listing, paths: Sequence[str], progress: bool) -> Path:
    """The folder in the Hugging Face cache with the files `paths`. Missing files are fetched.

    A broken download is resumed where it broke. Raises the errors of `listed`, and `EngineError` if a fetched
    file has not the size and the digest that the hub gives; the file is removed.
    """
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    name = listing.name
    new = [
        listing.files[path]
        for path in paths
        if not isinstance(try_to_load_from_cache(name.repository, path, revision=listing.commit), str)
    ]
    patterns = [re.sub(r"([\[*?])", r"[\1]", path) for path in paths]
    with refusals(name), _bars(progress):
        folder = Path(snapshot_download(name.repository, revision=name.revision, allow_patterns=patterns))
    if folder.name != listing.commit:  # the branch has moved since
        listing = listed(name)
    for file in new:
        _check(folder / file.path, listing.files[file.path])
    return folder


def read_range(name: HubName, path: str, start: int, stop: int) -> bytes:
    """The bytes [start, stop) of a file; fewer if the file ends before `stop`."""
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    url = hf_hub_url(name.repository, path, revision=name.revision, endpoint=HfApi().endpoint)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    with refusals(name):
        answer = get_session().get(url, headers=headers, follow_redirects=True)
        hf_raise_for_status(answer)
    content: bytes = answer.content
    return content if answer.status_code == 206 else content[start:stop]


def headers_of(listing: Listing, paths: Sequence[str]) -> Path:
    """The folder in Ramify's cache with the files `paths`, fetched without their weights.

    Each file has its full size, with a hole in place of the weights, so that any reader takes it for the
    whole file.
    """
    key = hashlib.sha256("\0".join([listing.commit, *paths]).encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        for path in paths:
            _write_header(listing, path, folder / path)

    name = listing.name.repository.replace("/", "--")
    return cache.ensure(cache.home() / "headers" / f"{name}-{key}", build)


def _write_header(listing: Listing, path: str, target: Path) -> None:
    size = listing.files[path].size
    content = read_range(listing.name, path, 0, min(size, HEADER_BLOCK)) if size else b""
    if path.endswith(".gguf"):
        while (end := size_of_header(content)) is None and len(content) < size:
            stop = min(size, len(content) + HEADER_BLOCK)
            content += read_range(listing.name, path, len(content), stop)
    else:
        end = 8 + int.from_bytes(content[:8], "little") if path.endswith(".safetensors") else size
        if len(content) < end:
            content += read_range(listing.name, path, len(content), end)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        file.write(content[:end])
        file.truncate(size)


@contextmanager
def refusals(name: HubName) -> Iterator[None]:
    """Context that turns the errors of `huggingface_hub` into ours."""
    from huggingface_hub import constants, errors

    where = f"{name.repository} on the Hugging Face hub"
    token = "Give a token that may read it, in HF_TOKEN or by `hf auth login`."
    try:
        yield
    except RamifyError:
        raise
    except errors.GatedRepoError as error:
        raise Unauthorized(
            f"{where} is gated: its owner gives access to those who ask for it.",
            field="model",
            remedy=f"Ask for access on its page. {token}",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise NotFound(
            f"{where} has no revision {name.revision}.", field="model", remedy="Name a branch, tag or commit."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise NotFound(
            f"There is no {where}, or it is private.", field="model", remedy=f"Look at its name. {token}"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise Unauthorized(
                f"The hub refuses {where}, with status {status}: {_first_line(error)}",
                field="model",
                remedy=token,
            ) from error
        raise Unreachable(f"the Hugging Face hub answers with status {status}") from error
    except errors.OfflineModeIsEnabled as error:
        raise Unreachable("HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked") from error
    except Exception as error:  # no network, a proxy's refusal, a full disk, …
        parts = urlsplit(constants.ENDPOINT)
        try:
            proxy = proxy_for(parts.scheme, parts.netloc.rpartition("@")[2])
        except InvalidRequest as wrong:
            raise Unreachable(f"the Hugging Face hub: {wrong}") from error
        if not is_connection(error):
            raise Unreachable(f"the Hugging Face hub: {_first_line(error)}") from error
        message, _ = unreachable(constants.ENDPOINT, error, proxy)
        raise Unreachable(f"{message} A mirror is named in HF_ENDPOINT, a proxy in HTTPS_PROXY.") from error


def _check(path: Path, file: HubFile) -> None:
    """Remove the file and raise `EngineError` unless it has the size and digest of `file`."""
    size = path.stat().st_size
    digest = hashlib.sha256() if file.lfs else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as content:
        while block := content.read(BLOCK):
            digest.update(block)
    if size == file.size and file.digest in (digest.hexdigest(), ""):  # a mirror may give none
        return
    blob = path.resolve()
    path.unlink()
    blob.unlink(missing_ok=True)
    kind = "SHA-256" if file.lfs else "git digest"
    raise EngineError(
        f"{file.path} came with {size} bytes and {kind} {digest.hexdigest()}; {file.size} bytes and "
        f"{file.digest} were expected, so it is not the published file.",
        field="model",
        remedy="It was removed. Try again; if it stays so, look at the proxy or the mirror in HF_ENDPOINT.",
        transient=True,
    )


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    hide = not shown and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()


def _within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return `call()`, or raise `Unreachable` after `seconds`. The time-out of a request does not cover name
    resolution."""
    outcome: list[Result | BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise Unreachable(f"the Hugging Face hub: no answer within {seconds:g} s")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _first_line(error: BaseException) -> str:
    return without_credentials((str(error).strip() or type(error).__name__).splitlines()[0])
