"""Schemas that a JSON schema refers to by URI or file name, put beside it. Nothing is ever fetched.

    {"$ref": "point.json#/$defs/x"}   with   {"point.json": {"$defs": {"x": {"type": "integer"}}}}

becomes a *compound document* (JSON Schema 2020-12 Core, section 9.3), in which each schema keeps its URI:

    {"$ref": "point.json#/$defs/x",
     "$defs": {"point.json": {"$id": "point.json", "$defs": {"x": {"type": "integer"}}}}}

A reference that no given schema answers stays as it is: the compiler refuses it, with its pointer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import msgspec

from ramify.errors import InvalidConstraint

Definitions = Mapping[str, Any] | str | os.PathLike[str]
"""Schemas by URI, as mappings, booleans or JSON text; or the path of a folder of schemas (`*.json`)."""

Find = Callable[[str], str | None]
"""The JSON text of the schema that has a URI or a file name; None where there is none."""

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_MAPS = frozenset(["properties", "patternProperties", "dependentSchemas", "dependencies"])
_MAPS |= {"$defs", "definitions"}
_VALUES = frozenset(["enum", "const", "default", "examples"])
"""Keywords that hold values, in which a ``$ref`` is a name like any other."""


def bundled(source: str, find: Find) -> str:
    """The schema `source` with those that it refers to, directly or through others.

    A reference means the schema of its URI, which is resolved against the ``$id`` around it. Failing that, it
    means the schema that `find` has under the reference as it is written. Raises as `find`.
    """
    if not _has_references(source):
        return source
    try:
        root = json.loads(source)
    except (ValueError, RecursionError):
        return source  # the compiler says what is wrong
    if not isinstance(root, dict):
        return source
    dialect = root.get("$schema")
    base = _identifier(root, root) or ""
    found: dict[str, str] = {}
    known = {"", base}
    queue = [(root, base)]
    for document, at in queue:
        references, resources = _references(document, at)
        known |= resources
        for reference, around in references:
            uri = urljoin(around, reference)
            if uri in known:
                continue
            text = find(uri) or find(reference)
            if text is None:
                continue
            known.add(uri)
            found[uri] = _with_identifier(text, uri, dialect)
            queue.append((json.loads(text), uri))
    return _with_schemas(source, found) if found else source


def bundled_tag(source: str, find: Find) -> str:
    """The structural tag `source`, whose schemas are `bundled`."""
    if not _has_references(source):
        return source
    try:
        return _bundled_inside(msgspec.Raw(source.encode()), find).decode()
    except (msgspec.DecodeError, RecursionError):
        return source  # the compiler says what is wrong


def _bundled_inside(tag: bytes, find: Find) -> bytes:
    begins = bytes(tag).lstrip()[:1]
    if begins == b"[":
        items = msgspec.json.decode(tag, type=list[msgspec.Raw])
        return msgspec.json.encode([msgspec.Raw(_bundled_inside(item, find)) for item in items])
    if begins != b"{":
        return bytes(tag)
    members = msgspec.json.decode(tag, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(
        {
            name: msgspec.Raw(
                bundled(bytes(member).decode(), find).encode()
                if name in ("json_schema", "schema")
                else _bundled_inside(member, find)
            )
            for name, member in members.items()
        }
    )


def _has_references(source: str) -> bool:
    return any(f'"{keyword}"' in source for keyword in _REFERENCES)


def _references(document: Any, base: str) -> tuple[list[tuple[str, str]], set[str]]:
    """(reference without its fragment, base URI around it) of each, and the URIs of embedded schemas."""
    references: dict[tuple[str, str], None] = {}
    resources: set[str] = set()
    queue: list[tuple[Any, str, bool]] = [(document, base, False)]
    for value, around, is_map in queue:
        if isinstance(value, list):
            queue += [(item, around, False) for item in value]
        if not isinstance(value, dict):
            continue
        if not is_map and value is not document:
            identifier = _identifier(value, document)
            if identifier:
                around = urljoin(around, identifier)
                resources.add(around)
        for keyword, inner in value.items():
            if is_map or keyword not in _VALUES:
                queue.append((inner, around, not is_map and keyword in _MAPS))
            if not is_map and keyword in _REFERENCES and isinstance(inner, str):
                named = inner.partition("#")[0]
                if named:
                    references[named, around] = None
    return list(references), resources


def _identifier(schema: dict[str, Any], document: dict[str, Any]) -> str | None:
    """The URI that a schema gives itself: in draft-04 by ``id``. A fragment alone is none."""
    value = schema.get("id" if "draft-04" in str(document.get("$schema")) else "$id")
    return value.partition("#")[0] if isinstance(value, str) else None


def _with_identifier(text: str, uri: str, dialect: Any) -> str:
    """The schema `text` with `uri` as its own, and with ``$schema`` (of `dialect`, where it has none)."""
    if text.strip() in ("true", "false"):
        return json.dumps({"$id": uri, "allOf": [json.loads(text)]})
    members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    if "$schema" not in members and isinstance(dialect, str):
        members["$schema"] = _raw(dialect)
    draft_04 = "$schema" in members and b"draft-04" in bytes(members["$schema"])
    members["id" if draft_04 else "$id"] = _raw(uri)
    return msgspec.json.format(msgspec.json.encode(members), indent=-1).decode()  # without white space


def _with_schemas(source: str, schemas: Mapping[str, str]) -> str:
    # The rest stays as it is written: numbers keep their digits.
    members = msgspec.json.decode(source, type=dict[str, msgspec.Raw])
    existing = msgspec.json.decode(members.get("$defs", b"{}"), type=dict[str, msgspec.Raw])
    added = {uri: msgspec.Raw(text.encode()) for uri, text in schemas.items()}
    members["$defs"] = msgspec.Raw(msgspec.json.encode(added | existing))
    return msgspec.json.encode(members).decode()


def _raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(text))


def remedy(uri: str, reference: str) -> str:
    """The ways to give the schema that `reference`, resolved to `uri`, leads to."""
    names = dict.fromkeys(map(_file_of, (uri, reference)))
    files = [
        name for name in names if name.endswith(".json") and not {"", ".", ".."}.intersection(name.split("/"))
    ]
    as_file = f" as {' or '.join(files)}, or" if files else ""
    return (
        "Nothing is fetched. Give that schema in definitions, under its URI; or put it under $defs, with its"
        f" URI as its $id; or into the server's folder of schemas (--schemas),{as_file} with its URI as its"
        " $id."
    )


def _file_of(uri: str) -> str:
    """The path in a folder of schemas at which the schema of `uri` is looked up."""
    parts = urlsplit(uri)
    return f"{parts.netloc}{parts.path}"


# --- where schemas come from --------------------------------------------------------------------


def finder(definitions: Definitions) -> Find:
    """The function that finds the schemas of `definitions`.

    A mapping's schemas are found by their key and by their ``$id``, those of a folder as `SchemaFolder.find`
    says. Raises `InvalidConstraint` for what is no JSON schema, and where there is no such folder.
    """
    if not isinstance(definitions, Mapping):
        return SchemaFolder.at(definitions).find
    texts: dict[str, str] = {}
    for uri, schema in definitions.items():
        if not isinstance(uri, str):
            raise InvalidConstraint(
                f"definitions has the key {uri!r}; it must be a URI.", field="definitions"
            )
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
            own = _checked(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidConstraint(
                f"definitions[{uri!r}] is no JSON schema: {error}.", field="definitions"
            ) from None
        texts[uri.rstrip("#")] = text
        if own is not None:
            texts.setdefault(own, text)
    return texts.get


def _checked(text: str) -> str | None:
    """The URI that the schema gives itself. Raises `ValueError` where `text` is no schema."""
    schema = json.loads(text)
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object or a boolean")
    return _identifier(schema, schema) or None


class SchemaFolder:
    """The schemas of a folder and the folders in it: all files `*.json` that hold an object."""

    def __init__(self, folder: Path, files: Iterator[Path] | tuple[Path, ...]) -> None:
        self._by_path: dict[str, Path] = {}
        self._by_uri: dict[str, list[Path]] = {}
        for file in files:
            self._by_path[file.relative_to(folder).as_posix()] = file
            try:
                uri = _checked(file.read_text("utf-8-sig"))
            except (OSError, ValueError, RecursionError) as error:
                raise InvalidConstraint(
                    f"{file} is no JSON schema: {error}.",
                    field="definitions",
                    remedy="Take it out of the folder of schemas, or mend it.",
                ) from None
            if uri is not None:
                self._by_uri.setdefault(uri, []).append(file)

    @classmethod
    def at(cls, folder: str | os.PathLike[str]) -> SchemaFolder:
        """The schemas in `folder`, read again when a file of it has changed.

        Raises `InvalidConstraint` where there is no such folder.
        """
        path = Path(folder)
        if not path.is_dir():
            raise InvalidConstraint(f"There is no folder {str(path)!r} of schemas.", field="definitions")
        return _read(path, tuple((file, file.stat().st_mtime_ns) for file in sorted(path.rglob("*.json"))))

    def find(self, uri: str) -> str | None:
        """The text of the schema whose ``$id`` is `uri`, or whose path in the folder is `uri` or, for an
        absolute URI, its host and path. Of several with that ``$id`` it is the one whose name `uri` ends in.

        Raises `InvalidConstraint` where that is none of them.
        """
        files = self._by_uri.get(uri, [])
        if len(files) > 1:
            files = [file for file in files if uri.endswith(f"/{file.name}")] or files
        if len(files) > 1:
            names = " and ".join(str(file) for file in files)
            raise InvalidConstraint(
                f"{names} have the same $id {uri!r}, which a $ref leads to.",
                field="definitions",
                remedy="Keep one of them in the folder of schemas.",
            )
        file = files[0] if files else self._by_path.get(_file_of(uri))
        return None if file is None else file.read_text("utf-8-sig")


@lru_cache(maxsize=4)
def _read(folder: Path, files: tuple[tuple[Path, int], ...]) -> SchemaFolder:
    return SchemaFolder(folder, tuple(file for file, _ in files))
