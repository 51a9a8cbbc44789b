"""Bundling: the schemas that a JSON schema refers to by URI or file name are embedded in it.

Nothing is ever fetched.

    {"$ref": "point.json#/$defs/x"}   with   {"point.json": {"$defs": {"x": {"type": "integer"}}}}

becomes a *compound document* (JSON Schema 2020-12 Core, section 9.3), in which each schema keeps its URI:

    {"$ref": "point.json#/$defs/x",
     "$defs": {"point.json": {"$id": "point.json", "$defs": {"x": {"type": "integer"}}}}}

If an external schema has an ``$id``, it keeps the ``$id``, and references to the schema by another name are
changed to that URI. A reference for which no schema is found is not changed; the compiler then refuses it,
with its JSON pointer.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urljoin, urlsplit

import msgspec

from ramify.errors import InvalidConstraint
from ramify.json_text import escape, no_constant

Definitions = Mapping[str, Any] | str | os.PathLike[str]
"""External schemas: URI → schema (a mapping, a boolean or JSON text), or the path of a folder of schemas
(`*.json`)."""

Find = Callable[[str], str | None]
"""A function from a schema's URI or file name to the schema's JSON text; None if there is no such schema."""

MAX_SOURCE_BYTES = 1 << 20
"""Longest constraint that is accepted, in UTF-8 bytes. A longer one is refused without being parsed."""

MAX_URI_LENGTH = 1024
"""Longest resolved URI in a schema, in characters."""

MAX_REFERENCES = 10_000
"""Most distinct references from the schemas of a constraint to other schemas."""

MAX_FOLDER_BYTES = 64 << 20
"""Largest total size of the schemas of a folder, in bytes. They are kept in memory."""

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_MAPS = frozenset(["properties", "patternProperties", "dependentSchemas", "dependencies"])
_MAPS |= {"$defs", "definitions"}
_VALUES = frozenset(["enum", "const", "default", "examples"])
"""Keywords whose content is plain values, in which a ``$ref`` is not a reference."""


def check_size(kind: str, size: int) -> None:
    """Raise `InvalidConstraint` if `size`, in bytes, is more than `MAX_SOURCE_BYTES`."""
    if size > MAX_SOURCE_BYTES:
        raise InvalidConstraint(
            f"The {kind} has {size} bytes; at most {MAX_SOURCE_BYTES} are accepted.",
            field=kind,
            remedy="Split it, or move constant text into the prompt.",
        )


def resolved(base: str, reference: str, pointer: str | None = None) -> str:
    """Resolve `reference`, a URI reference without fragment, against the base URI `base`; returns the URI.

    In a relative result the path is normalised: it has no "." segment, and ".." segments only at its
    beginning. Raises `InvalidConstraint`, with `pointer`, if the result is not a URI, or is too long.
    """
    try:
        uri = urljoin(base, reference)
        parts = urlsplit(uri)
        uri.encode()
    except ValueError as error:
        _no_uri(reference, str(error), pointer)
    if len(uri) > MAX_URI_LENGTH:
        _no_uri(reference, f"with its base it has more than {MAX_URI_LENGTH} characters", pointer)
    if not parts.scheme and not parts.netloc and not {".", ".."}.isdisjoint(parts.path.split("/")):
        end = "/" if parts.path.endswith(("/", "/.", "/..")) else ""
        uri = parts._replace(path=posixpath.normpath(parts.path) + end).geturl()
    return uri


def _no_uri(reference: str, reason: str, pointer: str | None) -> NoReturn:
    raise InvalidConstraint(
        f"{reference!r:.80} is no URI: {reason}.",
        pointer=pointer,
        remedy="Write a URI such as https://example.org/point.json, or a relative one such as point.json.",
    )


def has_references(source: str) -> bool:
    """Whether `source` may contain a reference."""
    return any(f'"{keyword}"' in source for keyword in _REFERENCES)


def bundled(source: str, find: Find) -> str:
    """The schema `source`, with all schemas embedded to which it refers directly or through other schemas.

    A reference is resolved against the ``$id`` around it, and `find` is asked for the resulting URI. If
    `find` has no such schema, `find` is asked for the reference as written. Raises the errors of `find`, and
    `InvalidConstraint` if the result is too long, or if a reference or ``$id`` is not a URI.
    """
    return _with_bundles(source, find, "json_schema", lambda root: [(root, None)])


def bundled_tag(source: str, find: Find) -> str:
    """The structural tag `source` with each of its schemas `bundled`.

    The size limit holds for the whole tag.
    """
    return _with_bundles(source, find, "structural_tag", _schemas_of_tag)


_Place = tuple[Any, str | int] | None
"""The place of a value in a document: the place of the value around it, and the key or index in that value.
None for the root."""


def _with_bundles(
    source: str, find: Find, kind: str, schemas: Callable[[Any], list[tuple[Any, _Place]]]
) -> str:
    if not has_references(source):
        return source
    try:
        root = _parsed(source)
    except (ValueError, RecursionError):
        return source  # the compiler will report the error
    size = _Size(kind, len(source.encode()))
    bundles = [
        _Bundle(schema, place, find, size) for schema, place in schemas(root) if isinstance(schema, dict)
    ]
    changed = [bundle.changed() for bundle in bundles]
    if not any(changed):
        return source
    try:
        return msgspec.json.encode(root).decode()
    except (ValueError, RecursionError) as error:
        raise InvalidConstraint(
            f"The {kind} with its definitions cannot be written as JSON: {error}.",
            field=kind,
            remedy="Write whole characters, and nest it less.",
        ) from None


def _parsed(text: str) -> Any:
    """Parse a JSON text, in which numbers keep their spelling. Raises `ValueError` if it is not JSON."""
    return json.loads(text, parse_int=_number, parse_float=_number, parse_constant=no_constant)


def _number(digits: str) -> msgspec.Raw:
    return msgspec.Raw(digits.encode())


def _schemas_of_tag(tag: Any) -> list[tuple[Any, _Place]]:
    found: list[tuple[Any, _Place]] = []
    queue: list[tuple[Any, _Place]] = [(tag, None)] if _holds(tag) else []
    for value, place in queue:
        members = enumerate(value) if isinstance(value, list) else value.items()
        for name, inner in members:
            if _holds(inner):
                (found if name in ("json_schema", "schema") else queue).append((inner, (place, name)))
    return found


@dataclass
class _Size:
    """The growing size of a constraint, checked against the limits."""

    kind: str
    bytes: int
    references: int = 0

    def add_texts(self, *texts: str) -> None:
        self.bytes += sum(len(text.encode()) for text in texts)
        check_size(self.kind, self.bytes)

    def add_reference(self, pointer: str) -> None:
        self.references += 1
        if self.references > MAX_REFERENCES:
            raise InvalidConstraint(
                f"More than {MAX_REFERENCES} references lead out of the {self.kind}.",
                pointer=pointer,
                remedy="Put schemas under $defs, and refer to them there.",
            )


@dataclass
class _Reference:
    holder: dict[str, Any]
    keyword: str
    around: str
    """The base URI against which the reference is resolved."""
    place: _Place


@dataclass
class _Bundle:
    """A schema, `root`, into which the schemas that it refers to are embedded."""

    root: dict[str, Any]
    place: _Place
    find: Find
    size: _Size
    embedded: dict[str, Any] = field(default_factory=dict)
    """Key in ``$defs`` → embedded schema."""
    texts: dict[str, str] = field(default_factory=dict)
    """URI → text of the embedded schema."""
    by_name: dict[str, str] = field(default_factory=dict)
    """Name under which `find` had a schema → URI of that schema, which is embedded."""
    answers: dict[tuple[str, str], str | None] = field(default_factory=dict)
    """(base URI, reference) → the reference to write in its place; None to leave it unchanged."""
    known: set[str] = field(default_factory=set)
    """The URIs of all schemas in `root`, embedded ones included."""

    def changed(self) -> bool:
        """Embed the schemas to which `root` refers. Returns whether any were embedded."""
        base = _base(self.root, self.root, "", self.place)
        self.known = {"", base}
        queue = [(self.root, base, self.place)]
        for document, at, place in queue:
            references, resources = _references(document, at, place)
            self.known |= resources
            for reference in references:
                queue += self._answer(reference)
        if self.embedded:
            self.root["$defs"] = self._definitions() | self.embedded
        return bool(self.embedded)

    def _definitions(self) -> dict[str, Any]:
        definitions = self.root.get("$defs", {})
        if not isinstance(definitions, dict):
            raise InvalidConstraint(
                "$defs is an object.",
                pointer=_pointer((self.place, "$defs")),
                remedy="Write schemas by name there, or leave it out.",
            )
        return definitions

    def _answer(self, reference: _Reference) -> list[tuple[Any, str, _Place]]:
        """Make `reference` lead to its embedded schema; a reference for which none is found stays unchanged.

        Returns (schema, its URI, its place) in a list if the schema is embedded by this call, else an empty
        list.
        """
        named, mark, fragment = reference.holder[reference.keyword].partition("#")
        case = (reference.around, named)
        new: list[tuple[Any, str, _Place]] = []
        if case not in self.answers:
            self.answers[case], new = self._find(named, reference)
        written = self.answers[case]
        if written is not None:
            reference.holder[reference.keyword] = written + mark + fragment
        return new

    def _find(self, named: str, reference: _Reference) -> tuple[str | None, list[tuple[Any, str, _Place]]]:
        pointer = _pointer(reference.place)
        uri = resolved(reference.around, named, pointer)
        if uri in self.known:
            return None, []
        self.size.add_reference(pointer)
        name = uri
        text = self.find(name)
        if text is None:
            name = resolved("", named)
            text = self.find(name)
        if text is None:
            return None, []
        new: list[tuple[Any, str, _Place]] = []
        target = self.by_name.get(name)
        if target is None or _written(target, reference.around) is None:
            target, new = self._embed(text, uri)
            self.by_name[name] = target
        return None if target == uri else _written(target, reference.around), new

    def _embed(self, text: str, uri: str) -> tuple[str, list[tuple[Any, str, _Place]]]:
        """Embed the schema `text`, which was found under `uri`, unless a schema with its URI is known.

        Returns the schema's own URI, and a list with (schema, URI, place), empty if the schema was known.
        """
        document = _parsed(text)
        if isinstance(document, bool):
            document = {"$id": uri, "allOf": [document]}
        dialect = self.root.get("$schema")
        if "$schema" not in document and isinstance(dialect, str):
            document["$schema"] = dialect
        key = uri
        while key in self.embedded or key in self._definitions():
            key += "_"
        place = ((self.place, "$defs"), key)
        target = _base(document, document, uri, place)
        if target in self.known:
            if self.texts.get(target, text) != text:
                raise InvalidConstraint(
                    f"Two schemas that references lead to have the same $id {target!r}.",
                    field="definitions",
                    remedy="Give each an $id of its own, or none.",
                )
            return target, []
        self.size.add_texts(text, key, target)
        document[_id_keyword(document)] = _written(target, _base(self.root, self.root, "", None)) or target
        self.embedded[key] = document
        self.texts[target] = text
        self.known.add(target)
        return target, [(document, target, place)]


def _written(uri: str, base: str) -> str | None:
    """A reference that resolves to `uri` against the base URI `base`; None if there is none."""
    if resolved(base, uri) == uri:
        return uri
    parts = urlsplit(uri)
    path = posixpath.relpath(parts.path or ".", posixpath.dirname(urlsplit(base).path) or ".")
    relative = parts._replace(path=path).geturl()
    return relative if resolved(base, relative) == uri else None


def _references(document: Any, base: str, place: _Place) -> tuple[list[_Reference], set[str]]:
    """The references in `document` that are not to itself, and the URIs of the schemas embedded in it."""
    references: list[_Reference] = []
    resources: set[str] = set()
    queue: list[tuple[Any, str, bool, _Place]] = [(document, base, False, place)]
    for value, around, is_map, at in queue:
        if isinstance(value, list):
            queue += [(item, around, False, (at, i)) for i, item in enumerate(value) if _holds(item)]
            continue
        if not is_map and value is not document:
            own = _base(value, document, around, at)
            if own != around:
                around = own
                resources.add(around)
        for keyword, inner in value.items():
            if _holds(inner) and (is_map or keyword not in _VALUES):
                queue.append((inner, around, not is_map and keyword in _MAPS, (at, keyword)))
            if (
                not is_map
                and keyword in _REFERENCES
                and isinstance(inner, str)
                and inner[:1] not in ("", "#")
            ):
                references.append(_Reference(value, keyword, around, (at, keyword)))
    return references, resources


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list)


_REF_ALONE = re.compile("draft-0[467]")
"""The drafts of JSON Schema in which all keywords beside a ``$ref`` are ignored, ``$id`` too."""


def _id_keyword(document: dict[str, Any]) -> str:
    return "id" if "draft-04" in str(document.get("$schema")) else "$id"


def _base(schema: dict[str, Any], document: dict[str, Any], around: str, place: _Place) -> str:
    """The base URI inside `schema`, a schema in `document`: its own URI if it has one, else `around`.

    An ``$id`` that is only a fragment is not a URI of its own.
    """
    keyword = _id_keyword(document)
    if "$ref" in schema and "$schema" not in schema and _REF_ALONE.search(str(document.get("$schema"))):
        return around
    value = schema.get(keyword)
    named = value.partition("#")[0] if isinstance(value, str) else ""
    return resolved(around, named, _pointer((place, keyword))) if named else around


def _pointer(place: _Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, step = place
        steps.append("/" + escape(str(step)))
    return "".join(reversed(steps))


def remedy(uri: str, reference: str) -> str:
    """A remedy for a reference without a schema: the ways to supply it. `uri`: the resolved `reference`."""
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
    """The path in a folder of schemas at which a schema with the URI `uri` is looked up."""
    parts = urlsplit(uri)
    return f"{parts.netloc}{parts.path}"


# --- where schemas come from --------------------------------------------------------------------


def finder(definitions: Definitions) -> Find:
    """The function that finds schemas in `definitions`.

    A schema in a mapping is found by its key and by its ``$id``; a schema in a folder, as described at
    `SchemaFolder.find`. Raises `InvalidConstraint` if an entry of a mapping is not a JSON schema, or if there
    is no such folder.
    """
    if not isinstance(definitions, Mapping):
        return SchemaFolder.at(definitions).find
    texts: dict[str, str] = {}
    own: dict[str, str] = {}
    for uri, schema in definitions.items():
        if not isinstance(uri, str):
            raise InvalidConstraint(
                f"definitions has the key {uri!r}; it must be a URI.", field="definitions"
            )
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
            key, names = _names(text, uri.rstrip("#"))
        except (TypeError, ValueError, RecursionError, InvalidConstraint) as error:
            raise InvalidConstraint(
                f"definitions[{uri!r}] is no JSON schema: {str(error).rstrip('.')}.", field="definitions"
            ) from None
        texts[key] = text
        for name in names:
            own.setdefault(name, text)
    return (own | texts).get


def _names(text: str, uri: str) -> tuple[str, list[str]]:
    """The names of the schema `text`: `uri`, normalised; and its ``$id``, resolved against `uri` and as
    written.

    Raises `ValueError` if `text` is not a schema, and `InvalidConstraint` if a name is not a URI.
    """
    schema = _parsed(text)
    text.encode()
    key = resolved("", uri)
    if isinstance(schema, bool):
        return key, []
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object or a boolean")
    names = [_base(schema, schema, around, None) for around in (key, "")]
    return key, [name for name in names if name not in ("", key)]


class SchemaFolder:
    """The schemas of a folder and its subfolders: all files `*.json` that contain an object or a boolean.

    Their texts, at most `MAX_FOLDER_BYTES` together, are kept in memory.
    """

    def __init__(self, folder: Path, files: tuple[Path, ...]) -> None:
        self._texts: dict[str, str] = {}
        self._bad: dict[str, str] = {}
        """Path of a file that is not a schema → the reason."""
        self._by_uri: dict[str, list[str]] = {}
        size = 0
        for file in files:
            name = file.relative_to(folder).as_posix()
            try:
                check_size("file", file.stat().st_size)  # not read: it is too large to embed
                text = file.read_text("utf-8-sig")
                _, names = _names(text, "")
            except (OSError, ValueError, RecursionError, InvalidConstraint) as error:
                self._bad[name] = str(error).rstrip(".")
                continue
            size += len(text.encode())
            if size > MAX_FOLDER_BYTES:
                raise InvalidConstraint(
                    f"The folder {str(folder)!r} has more than {MAX_FOLDER_BYTES} bytes of schemas.",
                    field="definitions",
                    remedy="Keep only those in it that others refer to.",
                )
            self._texts[name] = text
            for uri in set(names):
                self._by_uri.setdefault(uri, []).append(name)

    @classmethod
    def at(cls, folder: str | os.PathLike[str]) -> SchemaFolder:
        """The schemas in `folder`. They are read again if a file in it has changed.

        Raises `InvalidConstraint` if there is no such folder, or if it is too large.
        """
        path = Path(folder)
        if not path.is_dir():
            raise InvalidConstraint(f"There is no folder {str(path)!r} of schemas.", field="definitions")
        files = sorted(file for file in path.rglob("*.json") if file.is_file())
        return _read(path, tuple((file, *_version(file)) for file in files))

    def find(self, uri: str) -> str | None:
        """The text of the schema that `uri` names; None if there is none.

        A schema whose ``$id`` is `uri` comes first. If several have this ``$id``, the one whose file name
        ends `uri` is taken. If no schema has it, the file is taken whose path in the folder is `uri`, or for
        an absolute URI, the URI's host and path.

        Raises `InvalidConstraint` if several schemas remain, and if the file is not a schema.
        """
        names = self._by_uri.get(uri, [])
        if len(names) > 1:
            names = [name for name in names if uri.endswith(f"/{posixpath.basename(name)}")] or names
        if len(names) > 1:
            raise InvalidConstraint(
                f"{' and '.join(names)} have the same $id {uri!r}, which a $ref leads to.",
                field="definitions",
                remedy="Keep one of them in the folder of schemas.",
            )
        name = names[0] if names else _file_of(uri)
        if name in self._bad:
            raise InvalidConstraint(
                f"{name}, which a $ref leads to, is no JSON schema: {self._bad[name]}.",
                field="definitions",
                remedy="Mend it in the folder of schemas.",
            )
        return self._texts.get(name)


def _version(file: Path) -> tuple[int, int]:
    try:
        stat = file.stat()
    except OSError:  # the file has been removed since
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=4)
def _read(folder: Path, files: tuple[tuple[Path, int, int], ...]) -> SchemaFolder:
    return SchemaFolder(folder, tuple(file for file, _, _ in files))
