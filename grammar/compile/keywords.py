"""Effect of each JSON Schema keyword in each backend, measured with the schemas of the tests.

``backend_keywords.json`` is written by ``python docs/backend_keywords.py``. A *feature* is a keyword,
together with its value if the value matters. The *pair* "a | b" is feature a in a subschema that also has
feature b:

    {"type": "string", "minLength": 2}     features  type string, minLength
                                           pairs     type string | minLength, minLength | type string

A feature is *enforced* if some instances that violate only this feature were tried, and all of them were
rejected.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import msgspec

from ramify.grammar.schema.document.check import KEYWORDS, SchemaDocument
from ramify.grammar.schema.document.formats import FORMATS
from ramify.json_text import escape
from ramify.messages import Unenforced

FILE = Path(__file__).with_name("backend_keywords.json")
PACKAGES = {"xgrammar": "xgrammar", "llguidance": "llguidance", "outlines": "outlines-core"}
"""The Python package of each backend's library."""

WIDENING = frozenset(["nullable", "minContains"])
"""Keywords that allow more values, not fewer. `Feature.narrowed` tells whether a backend supports them."""


Status = Literal["enforced", "widened", "refused", "unknown"]


class Feature(msgspec.Struct, frozen=True, omit_defaults=True):
    """Findings about a feature. `rejected` is the number of rejected instances that violate this feature
    alone."""

    status: Status
    rejected: int = 0
    narrowed: bool = False
    """Whether valid instances of schemas with the feature are rejected."""


class Found(msgspec.Struct, frozen=True):
    """Findings about a backend, by feature. A pair of features is listed if the pair, not its first feature
    alone, is "widened" or `narrowed`."""

    version: str
    features: dict[str, Feature]


@functools.cache
def table() -> dict[str, Found]:
    """Findings by backend. The installed libraries may have other versions than those measured."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, Found])


@functools.cache
def versions() -> dict[str, str]:
    """The installed version of each backend's library; "" where it is not installed."""
    return {backend: _version(package) for backend, package in PACKAGES.items()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def features(subschema: Mapping[str, Any]) -> dict[str, str]:
    """The features of a subschema itself, not of the subschemas inside it, each with its keyword."""
    found = {}
    for keyword, value in subschema.items():
        if keyword not in KEYWORDS or (keyword == "format" and value not in FORMATS):
            continue
        if value is False and keyword in ("uniqueItems", "nullable", "exclusiveMinimum", "exclusiveMaximum"):
            continue
        found[_feature(keyword, value, subschema)] = keyword
    return found


def _feature(keyword: str, value: Any, subschema: Mapping[str, Any]) -> str:
    if keyword in ("type", "format"):
        return f"{keyword} {value if isinstance(value, str) else 'list'}"
    if isinstance(value, bool) and keyword != "const":
        return f"{keyword} {str(value).lower()}"
    if keyword in ("items", "dependencies"):
        values = list(value.values()) if keyword == "dependencies" else [value]
        return f"{keyword} list" if any(isinstance(one, list) for one in values) else keyword
    if keyword == "required" and not set(value) <= set(subschema.get("properties", ())):
        return "required unnamed"
    if keyword == "pattern" and ("(?=" in value or "(?!" in value):
        return "pattern lookahead"
    if keyword == "$ref" and not value.startswith("#/") and value != "#":
        return "$ref by name"
    if keyword == "multipleOf" and isinstance(value, Decimal | float):
        return "multipleOf fraction"
    return keyword


def beside(subschema: Mapping[str, Any], own: str) -> Iterator[str]:
    """The pairs of the feature `own` with each other feature of the subschema. "no type" counts as a feature,
    and so does "no additionalProperties" if the subschema has properties."""
    others = [other for other in features(subschema) if other != own]
    if "type" not in subschema:
        others.append("no type")
    if "properties" in subschema and "additionalProperties" not in subschema:
        others.append("no additionalProperties")
    for other in others:
        yield f"{own} | {other}"


def _restricts(feature: str) -> bool:
    """Whether a feature restricts instances; ``additionalProperties: true``, for example, does not."""
    return not feature.endswith(" true") or feature in ("uniqueItems true", "exclusiveMinimum true")


def unenforced(document: SchemaDocument, backend: str) -> tuple[Unenforced, ...]:
    """The keywords of a schema that the backend is not known to enforce, with their pointers."""
    found = table()[backend]
    left_out = []
    for pointer, subschema in document.subschemas.items():
        own = document.keywords(pointer) if isinstance(subschema, dict) else {}
        for feature, keyword in features(own).items():
            if not _restricts(feature) or keyword in WIDENING:
                continue
            reason = _not_enforced(found, backend, own, feature)
            if reason:
                left_out.append(Unenforced(schema=f"{pointer}/{escape(keyword)}", message=reason))
    return tuple(left_out)


def _not_enforced(found: Found, backend: str, own: Mapping[str, Any], feature: str) -> str:
    status = found.features.get(feature)
    package = f"{PACKAGES[backend]} {found.version}"
    if status is None or status.status in ("refused", "unknown"):
        return f"It is not known whether {package} enforces {feature}."
    if status.status == "widened":
        return f"{package} does not enforce {feature}."
    for pair in beside(own, feature):
        if pair in found.features and found.features[pair].status == "widened":
            return f"{package} does not enforce {feature} beside {pair.partition(' | ')[2]}."
    return ""


def narrowed(document: SchemaDocument, backend: str) -> tuple[str, ...]:
    """The features of a schema for which the backend rejects valid instances."""
    found = table()[backend].features
    names: dict[str, None] = {}
    for pointer, subschema in document.subschemas.items():
        own = document.keywords(pointer) if isinstance(subschema, dict) else {}
        for feature in features(own):
            for name in (feature, *beside(own, feature)):
                if name in found and found[name].narrowed:
                    names[name] = None
    return tuple(names)
