"""Schemas like those of editors' schema stores: GitHub workflows, package.json, compose files, tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.grammar.collection.case import Case

DRAFT7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
EXPRESSION = {"type": "string", "pattern": "^\\$\\{\\{(.|[\r\n])*\\}\\}$"}
NAME = "^[_a-zA-Z][a-zA-Z0-9_-]*$"
ENV: dict[str, Any] = {
    "oneOf": [
        {
            "type": "object",
            "additionalProperties": {"oneOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]},
        },
        EXPRESSION,
    ]
}
EVENTS = ["push", "pull_request", "issues", "release", "schedule", "workflow_dispatch"]
STEP: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "dependencies": {"working-directory": ["run"], "shell": ["run"]},
    "oneOf": [{"required": ["uses"]}, {"required": ["run"]}],
    "properties": {
        "id": {"type": "string"},
        "if": {"type": ["boolean", "number", "string"]},
        "name": {"type": "string"},
        "uses": {"type": "string", "pattern": "^(\\./|docker://|[^@]+@).+"},
        "run": {"type": "string"},
        "working-directory": {"type": "string"},
        "shell": {"anyOf": [{"type": "string"}, {"enum": ["bash", "pwsh", "python", "sh", "cmd"]}]},
        "with": ENV,
        "env": ENV,
        "continue-on-error": {"oneOf": [{"type": "boolean"}, EXPRESSION], "default": False},
        "timeout-minutes": {"oneOf": [{"type": "number"}, EXPRESSION]},
    },
}
JOB: dict[str, Any] = {
    "type": "object",
    "required": ["runs-on"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "needs": {
            "oneOf": [
                {"type": "array", "items": {"type": "string", "pattern": NAME}, "minItems": 1},
                {"type": "string", "pattern": NAME},
            ]
        },
        "permissions": {
            "oneOf": [
                {"enum": ["read-all", "write-all"]},
                {"type": "object", "additionalProperties": {"enum": ["read", "write", "none"]}},
            ]
        },
        "runs-on": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "anyOf": [
                        {"items": [{"type": "string"}], "minItems": 1, "additionalItems": {"type": "string"}}
                    ],
                },
                {
                    "type": "object",
                    "properties": {"group": {"type": "string"}, "labels": {"type": ["string", "array"]}},
                },
            ]
        },
        "steps": {"type": "array", "items": {"$ref": "#/definitions/step"}, "minItems": 1},
        "strategy": {
            "type": "object",
            "required": ["matrix"],
            "properties": {
                "matrix": {
                    "oneOf": [
                        {
                            "type": "object",
                            "patternProperties": {
                                "^(in|ex)clude$": {
                                    "type": "array",
                                    "items": {"type": "object"},
                                    "minItems": 1,
                                }
                            },
                            "additionalProperties": {"oneOf": [{"type": "array", "minItems": 1}, EXPRESSION]},
                            "minProperties": 1,
                        },
                        EXPRESSION,
                    ]
                },
                "fail-fast": {"type": ["boolean", "string"]},
                "max-parallel": {"type": ["number", "string"]},
            },
            "additionalProperties": False,
        },
    },
}
WORKFLOW: dict[str, Any] = {
    **DRAFT7,
    "$id": "https://example.org/workflow.json",
    "definitions": {"step": STEP, "job": JOB, "event": {"enum": EVENTS}},
    "type": "object",
    "required": ["on", "jobs"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "on": {
            "oneOf": [
                {"$ref": "#/definitions/event"},
                {"type": "array", "items": {"$ref": "#/definitions/event"}, "minItems": 1},
                {
                    "type": "object",
                    "properties": {
                        **{event: {"type": ["object", "null"]} for event in EVENTS if event != "schedule"},
                        "schedule": {
                            "type": "array",
                            "items": {
                                "properties": {"cron": {"type": "string"}},
                                "additionalProperties": False,
                            },
                        },
                    },
                    "additionalProperties": False,
                },
            ]
        },
        "env": ENV,
        "jobs": {
            "type": "object",
            "patternProperties": {NAME: {"$ref": "#/definitions/job"}},
            "minProperties": 1,
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": ["object", "string"],
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "url": {"type": "string", "format": "uri"},
        "email": {"type": "string", "format": "email"},
    },
}
PACKAGE: dict[str, Any] = {
    **DRAFT7,
    "definitions": {
        "person": PERSON,
        "dependencies": {"type": "object", "additionalProperties": {"type": "string"}},
        "exports": {
            "anyOf": [
                {"type": ["string", "null"], "pattern": "^\\./"},
                {
                    "type": "object",
                    "patternProperties": {"^[^.0-9]+$": {"$ref": "#/definitions/exports"}},
                    "additionalProperties": False,
                },
                {"type": "array", "items": {"$ref": "#/definitions/exports"}},
            ]
        },
    },
    "type": "object",
    "patternProperties": {"^_": {"description": "reserved"}},
    "properties": {
        "name": {
            "type": "string",
            "maxLength": 214,
            "minLength": 1,
            "pattern": "^(@[a-z0-9-~][a-z0-9-._~]*/)?[a-z0-9-~][a-z0-9-._~]*$",
        },
        "version": {"type": "string"},
        "description": {"type": "string"},
        "keywords": {"type": "array", "items": {"type": "string"}},
        "homepage": {"type": "string"},
        "bugs": {
            "type": ["object", "string"],
            "properties": {"url": {"type": "string"}, "email": {"type": "string"}},
        },
        "license": {"anyOf": [{"type": "string"}, {"enum": ["MIT", "ISC", "Apache-2.0"]}]},
        "author": {"$ref": "#/definitions/person"},
        "contributors": {"type": "array", "items": {"$ref": "#/definitions/person"}},
        "main": {"type": "string"},
        "exports": {"$ref": "#/definitions/exports"},
        "bin": {"type": ["string", "object"], "additionalProperties": {"type": "string"}},
        "scripts": {
            "type": "object",
            "properties": {"test": {"type": "string"}},
            "additionalProperties": {"type": "string"},
        },
        "dependencies": {"$ref": "#/definitions/dependencies"},
        "devDependencies": {"$ref": "#/definitions/dependencies"},
        "engines": {
            "type": "object",
            "properties": {"node": {"type": "string"}},
            "additionalProperties": {"type": "string"},
        },
        "private": {"anyOf": [{"type": "boolean"}, {"enum": ["false", "true"]}]},
        "workspaces": {
            "anyOf": [
                {"type": "array", "items": {"type": "string"}},
                {
                    "type": "object",
                    "properties": {"packages": {"type": "array", "items": {"type": "string"}}},
                },
            ]
        },
    },
}
SERVICE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "image": {"type": "string"},
        "build": {
            "oneOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "properties": {
                        "context": {"type": "string"},
                        "args": {"$ref": "#/definitions/list_or_dict"},
                    },
                    "additionalProperties": False,
                    "patternProperties": {"^x-": {}},
                },
            ]
        },
        "command": {
            "oneOf": [{"type": "null"}, {"type": "string"}, {"type": "array", "items": {"type": "string"}}]
        },
        "environment": {"$ref": "#/definitions/list_or_dict"},
        "ports": {"type": "array", "items": {"type": ["number", "string"]}, "uniqueItems": True},
        "depends_on": {
            "oneOf": [
                {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
                {
                    "type": "object",
                    "additionalProperties": False,
                    "patternProperties": {
                        "^[a-zA-Z0-9._-]+$": {
                            "type": "object",
                            "required": ["condition"],
                            "properties": {"condition": {"enum": ["service_started", "service_healthy"]}},
                        }
                    },
                },
            ]
        },
        "restart": {"type": "string"},
        "stop_grace_period": {"type": "string"},
    },
    "patternProperties": {"^x-": {}},
    "additionalProperties": False,
}
COMPOSE: dict[str, Any] = {
    **DRAFT7,
    "type": "object",
    "definitions": {
        "service": SERVICE,
        "list_or_dict": {
            "oneOf": [
                {
                    "type": "object",
                    "patternProperties": {".+": {"type": ["string", "number", "boolean", "null"]}},
                    "additionalProperties": False,
                },
                {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            ]
        },
    },
    "properties": {
        "version": {"type": "string"},
        "services": {
            "type": "object",
            "patternProperties": {"^[a-zA-Z0-9._-]+$": {"$ref": "#/definitions/service"}},
            "additionalProperties": False,
        },
    },
    "patternProperties": {"^x-": {}},
    "additionalProperties": False,
}
RULE = {
    "oneOf": [
        {"$ref": "#/definitions/severity"},
        {"type": "array", "items": [{"$ref": "#/definitions/severity"}], "minItems": 1},
    ]
}
LINT: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-04/schema#",
    "definitions": {
        "severity": {
            "oneOf": [{"type": "integer", "minimum": 0, "maximum": 2}, {"enum": ["off", "warn", "error"]}]
        },
        "rules": {
            "type": "object",
            "properties": dict.fromkeys(("semi", "quotes", "no-undef"), RULE),
            "additionalProperties": RULE,
        },
        "strings": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    },
    "type": "object",
    "properties": {
        "root": {"type": "boolean"},
        "extends": {"$ref": "#/definitions/strings"},
        "env": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "globals": {
            "type": "object",
            "additionalProperties": {"enum": ["readonly", "writable", "off", True, False]},
        },
        "rules": {"$ref": "#/definitions/rules"},
        "overrides": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "files": {"$ref": "#/definitions/strings"},
                    "rules": {"$ref": "#/definitions/rules"},
                },
                "required": ["files"],
                "additionalProperties": False,
            },
        },
        "maxWarnings": {"type": "integer", "minimum": -1, "exclusiveMinimum": True},
    },
}


def cases() -> Iterator[Case]:
    whole = {"workflow": WORKFLOW, "package.json": PACKAGE, "compose": COMPOSE, "lint": LINT}
    for name, schema in whole.items():
        yield Case("configs", name, schema)
        for part, inner in schema["properties"].items():
            definitions = {key: schema[key] for key in ("definitions", "$schema") if key in schema}
            yield Case(
                "configs",
                f"{name}: {part}",
                {"type": "object", "properties": {part: inner}, "required": [part], **definitions},
            )
        for part in schema["definitions"]:
            yield Case(
                "configs",
                f"{name}: definition {part}",
                {**DRAFT7, "definitions": schema["definitions"], "$ref": f"#/definitions/{part}"},
            )
    for part, inner in {**JOB["properties"], **STEP["properties"]}.items():
        yield Case(
            "configs",
            f"workflow part {part}",
            {**DRAFT7, "definitions": WORKFLOW["definitions"], "properties": {part: inner}, "type": "object"},
        )
