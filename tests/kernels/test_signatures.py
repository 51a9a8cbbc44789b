"""The contract of an operation is stated once, by `kernels.reference`; its twins and its protocol follow.

A twin in `kernels.cpu` or `kernels.triton` has the reference's parameters, types and defaults. It may have
more keywords with defaults, which `registry.ops` sets. Its docstring points to the reference.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"


@functools.cache
def functions(folder: str) -> dict[str, ast.FunctionDef]:
    """Public functions of a backend, by name."""
    trees = [ast.parse(path.read_text()) for path in sorted((KERNELS / folder).glob("*.py"))]
    found = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in found if not node.name.startswith("_")}


REGISTRY = ast.parse((KERNELS / "registry.py").read_text())
CLASSES = {node.name: node for node in REGISTRY.body if isinstance(node, ast.ClassDef)}
TYPES = {
    node.target.id: ast.unparse(node.annotation).removesuffix(" | None")
    for name in ("Ops", "SamplingOps")
    for node in CLASSES[name].body
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
}
"""The type of each operation in the registry."""
REFERENCE = functions("reference")
OPERATIONS = sorted(TYPES.keys() & REFERENCE.keys())


def parameters(function: ast.FunctionDef) -> dict[str, str]:
    """Kind, type and default of each parameter, by name."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    pairs = [("positional", *pair) for pair in zip(positional, defaults, strict=True)]
    pairs += [("keyword", *pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return {
        each.arg: f"{kind} {ast.unparse(each.annotation) if each.annotation else ''} "
        f"{ast.unparse(default) if default else 'needed'}".replace("torch.Tensor", "Tensor")
        for kind, each, default in pairs
        if each.arg != "self"
    }


def test_every_operation_has_a_reference() -> None:
    others = {
        "flat_attention",
        "prompt_attention",
        "float8",
        "layer_linear",
        "layer_stack",
        "sampling",
        "planner",
        "flashinfer",
    }
    flags = {"prefers_packed", "deterministic"}
    assert TYPES.keys() - REFERENCE.keys() == others | flags
    assert len(OPERATIONS) > 20


@pytest.mark.parametrize("folder", ["cpu", "triton"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_twin_has_the_signature_of_its_reference(folder: str, name: str) -> None:
    twin = functions(folder).get(name)
    if twin is None:
        return
    ours, wanted = parameters(twin), parameters(REFERENCE[name])
    assert list(ours)[: len(wanted)] == list(wanted)
    assert {key: ours[key] for key in wanted} == wanted
    for key in ours.keys() - wanted.keys():
        assert ours[key].startswith("keyword bool"), f"{key} is no switch of the registry"
        assert not ours[key].endswith("needed")
    assert twin.returns
    assert (ast.get_docstring(twin) or "").startswith(("As `reference.", "As `kernels.reference."))


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_protocol_has_the_signature_of_the_reference(name: str) -> None:
    protocol = CLASSES.get(TYPES[name])
    if protocol is None:  # an alias of Callable: mypy compares it with each backend
        return
    (call,) = (node for node in protocol.body if isinstance(node, ast.FunctionDef))
    ours, wanted = parameters(call), parameters(REFERENCE[name])
    assert ours == wanted
    assert ast.get_docstring(protocol) is None, "the reference has it"
