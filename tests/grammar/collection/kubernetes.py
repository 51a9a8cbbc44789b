"""Schemas like those of Kubernetes: manifests and the validation of custom resources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.grammar.collection.case import Case

DNS_LABEL = {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
DNS_NAME = {
    "type": "string",
    "maxLength": 253,
    "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}
QUANTITY = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": "^(\\+|-)?(([0-9]+(\\.[0-9]*)?)|(\\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\\+|-)?[0-9]+))?$",
    "x-kubernetes-int-or-string": True,
}
INT_OR_STRING = {"oneOf": [{"type": "string"}, {"type": "integer"}], "format": "int-or-string"}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
METADATA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": DNS_NAME,
        "namespace": DNS_LABEL,
        "labels": LABELS,
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        "generation": {"type": "integer", "format": "int64"},
        "creationTimestamp": {"type": ["string", "null"], "format": "date-time"},
    },
}
PORT = {"type": "integer", "format": "int32", "minimum": 1, "maximum": 65535}
ENV = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
        "value": {"type": "string"},
        "valueFrom": {
            "type": "object",
            "properties": {
                source: {
                    "type": "object",
                    "required": ["key"],
                    "properties": {
                        "name": {"type": "string"},
                        "key": {"type": "string"},
                        "optional": {"type": "boolean"},
                    },
                }
                for source in ("configMapKeyRef", "secretKeyRef")
            },
            "minProperties": 1,
            "maxProperties": 1,
        },
    },
    "not": {"required": ["value", "valueFrom"]},
}
HANDLER = {
    "exec": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
    "httpGet": {
        "type": "object",
        "required": ["port"],
        "properties": {
            "path": {"type": "string"},
            "port": INT_OR_STRING,
            "scheme": {"enum": ["HTTP", "HTTPS"]},
        },
    },
    "tcpSocket": {"type": "object", "required": ["port"], "properties": {"port": INT_OR_STRING}},
}
PROBE = {
    "type": "object",
    "properties": {
        **HANDLER,
        "initialDelaySeconds": {"type": "integer", "format": "int32", "minimum": 0},
        "periodSeconds": {"type": "integer", "format": "int32", "minimum": 1, "default": 10},
    },
    "oneOf": [{"required": [name]} for name in HANDLER],
}
CONTAINER: dict[str, Any] = {
    "type": "object",
    "required": ["name", "image"],
    "properties": {
        "name": DNS_LABEL,
        "image": {"type": "string", "minLength": 1},
        "imagePullPolicy": {"enum": ["Always", "Never", "IfNotPresent"]},
        "command": {"type": "array", "items": {"type": "string"}},
        "args": {"type": "array", "items": {"type": "string"}},
        "env": {"type": "array", "items": ENV, "x-kubernetes-list-type": "map"},
        "ports": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["containerPort"],
                "properties": {
                    "containerPort": PORT,
                    "protocol": {"enum": ["TCP", "UDP", "SCTP"], "default": "TCP"},
                },
            },
        },
        "resources": {
            "type": "object",
            "properties": {
                kind: {"type": "object", "additionalProperties": QUANTITY} for kind in ("limits", "requests")
            },
        },
        "livenessProbe": PROBE,
        "readinessProbe": PROBE,
    },
}
POD_SPEC: dict[str, Any] = {
    "type": "object",
    "required": ["containers"],
    "properties": {
        "containers": {"type": "array", "items": CONTAINER, "minItems": 1},
        "initContainers": {"type": "array", "items": CONTAINER},
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never"]},
        "nodeSelector": LABELS,
        "terminationGracePeriodSeconds": {"type": "integer", "format": "int64", "minimum": 0},
    },
}
SELECTOR = {
    "type": "object",
    "properties": {
        "matchLabels": LABELS,
        "matchExpressions": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["key", "operator"],
                "properties": {
                    "key": {"type": "string"},
                    "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
                    "values": {"type": "array", "items": {"type": "string"}},
                },
                "if": {"properties": {"operator": {"enum": ["In", "NotIn"]}}, "required": ["operator"]},
                "then": {"required": ["values"], "properties": {"values": {"minItems": 1}}},
                "else": {"properties": {"values": {"maxItems": 0}}},
            },
        },
    },
}


def manifest(kind: str, version: str, spec: Any, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["apiVersion", "kind", "metadata"],
        "properties": {
            "apiVersion": {"const": version},
            "kind": {"const": kind},
            "metadata": METADATA,
            "spec": spec,
            **more,
        },
    }


WORKLOADS: dict[str, Any] = {
    "Pod": manifest("Pod", "v1", POD_SPEC),
    "Deployment": manifest(
        "Deployment",
        "apps/v1",
        {
            "type": "object",
            "required": ["selector", "template"],
            "properties": {
                "replicas": {"type": "integer", "format": "int32", "minimum": 0},
                "selector": SELECTOR,
                "template": {"type": "object", "properties": {"metadata": METADATA, "spec": POD_SPEC}},
                "strategy": {
                    "type": "object",
                    "properties": {
                        "type": {"enum": ["Recreate", "RollingUpdate"]},
                        "rollingUpdate": {
                            "type": "object",
                            "properties": {"maxSurge": INT_OR_STRING, "maxUnavailable": INT_OR_STRING},
                        },
                    },
                },
            },
        },
    ),
    "Service": manifest(
        "Service",
        "v1",
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]},
                "clusterIP": {"anyOf": [{"const": "None"}, {"format": "ipv4", "type": "string"}]},
                "ports": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"port": PORT, "targetPort": INT_OR_STRING, "nodePort": PORT},
                        "required": ["port"],
                    },
                },
                "selector": LABELS,
            },
        },
    ),
    "ConfigMap": manifest(
        "ConfigMap",
        "v1",
        True,
        data={
            "type": "object",
            "propertyNames": {"pattern": "^[-._a-zA-Z0-9]+$", "maxLength": 253},
            "additionalProperties": {"type": "string"},
        },
        binaryData={"type": "object", "additionalProperties": {"type": "string", "format": "byte"}},
        immutable={"type": "boolean"},
    ),
    "CronJob": manifest(
        "CronJob",
        "batch/v1",
        {
            "type": "object",
            "required": ["schedule", "jobTemplate"],
            "properties": {
                "schedule": {"type": "string", "pattern": "^(@(hourly|daily|weekly)|(\\S+ ){4}\\S+)$"},
                "concurrencyPolicy": {"enum": ["Allow", "Forbid", "Replace"]},
                "jobTemplate": {"type": "object", "properties": {"spec": {"type": "object"}}},
            },
        },
    ),
}


def cases() -> Iterator[Case]:
    for kind, schema in WORKLOADS.items():
        yield Case("kubernetes", kind, schema)
        closed = {**schema, "additionalProperties": False}
        yield Case("kubernetes", f"{kind} closed", closed)
    parts = {"metadata": METADATA, "container": CONTAINER, "probe": PROBE, "env": ENV, "selector": SELECTOR}
    parts |= {
        "pod": POD_SPEC,
        "quantity": QUANTITY,
        "int or string": INT_OR_STRING,
        "label": DNS_LABEL,
        "dns": DNS_NAME,
    }
    for name, schema in parts.items():
        yield Case("kubernetes", name, schema)
        yield Case(
            "kubernetes", f"list of {name}", {"type": "array", "items": schema, "minItems": 1, "maxItems": 4}
        )
    for count in range(2, 8):
        fields = dict(list(CONTAINER["properties"].items())[:count])
        yield Case(
            "kubernetes",
            f"resource with {count} fields",
            manifest(
                "Thing",
                "example.org/v1",
                {
                    "type": "object",
                    "properties": fields,
                    "required": list(fields)[: count // 2],
                    "x-kubernetes-preserve-unknown-fields": True,
                },
            ),
        )
    yield Case("kubernetes", "any manifest", {"oneOf": list(WORKLOADS.values())})
    props: dict[str, Any] = {"$ref": "#/definitions/JSONSchemaProps"}
    yield Case(
        "kubernetes",
        "schema of schemas",
        {
            "definitions": {
                "JSONSchemaProps": {
                    "type": "object",
                    "properties": {
                        "type": {"type": "string"},
                        "description": {"type": "string"},
                        "properties": {"type": "object", "additionalProperties": props},
                        "items": {"anyOf": [props, {"type": "array", "items": props}]},
                        "enum": {"type": "array", "items": True},
                        "minimum": {"type": "number"},
                        "required": {"type": "array", "items": {"type": "string"}},
                    },
                    "additionalProperties": False,
                }
            },
            **props,
        },
    )
