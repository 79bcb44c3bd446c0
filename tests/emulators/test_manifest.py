"""The stand-ins have the signatures of the published libraries, as extracted into ``manifest/``."""

import ast
import inspect
import json
import textwrap
from types import ModuleType

import pytest

from tests.emulators import deep_ep
from tests.emulators.extract_manifest import (
    LIBRARIES,
    MANIFEST,
    gpu_requirements,
    parameters,
    signatures,
)


def manifest_of(name: str) -> dict[str, list[str]]:
    """Signatures by qualified name, of all sources of a library."""
    sources = json.loads((MANIFEST / f"{name}.json").read_text(encoding="utf-8"))["sources"]
    return {name: listed for source in sources.values() for name, listed in source.items()}


def described(function: object) -> list[str]:
    """The parameters of a live function, as the manifest has them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    node = tree.body[0]
    assert isinstance(node, ast.FunctionDef)
    return parameters(node.args)


def stand_in_functions(module: ModuleType, classes: tuple[str, ...]) -> dict[str, list[str]]:
    found = {}
    for class_name in classes:
        for name, member in inspect.getmembers(getattr(module, class_name), inspect.isfunction):
            if not name.startswith("_") or name == "__init__":
                found[f"{class_name}.{name}"] = described(member)
    return found


def test_deep_ep_has_the_signatures_of_the_library():
    manifest = manifest_of("deep_ep")
    classes = ("Buffer", "ElasticBuffer", "EPHandle", "EventOverlap")
    stand_in = stand_in_functions(deep_ep, classes)
    assert {name: manifest.get(name) for name in stand_in} == stand_in
    for name in ("Buffer.low_latency_dispatch", "ElasticBuffer.dispatch", "EPHandle.__init__"):
        assert name in stand_in


@pytest.mark.parametrize("distribution", list(LIBRARIES))
def test_the_manifest_is_of_the_version_that_is_installed(distribution):
    name, sources = LIBRARIES[distribution]
    manifest = json.loads((MANIFEST / f"{name}.json").read_text(encoding="utf-8"))
    assert f"{distribution}=={manifest['version']}" in gpu_requirements()
    assert manifest["version"] in manifest["wheel"]
    assert list(manifest["sources"]) == list(sources)
    assert all(manifest["sources"].values())


def test_all_kinds_of_parameters_are_read():
    source = """
def f(a, /, b, c=1, *d, e, g=None, **h): ...
def _private(): ...
class C:
    def __init__(self, *, x: int = 2) -> None: ...
    def _private(self): ...
    @staticmethod
    def s(y='z'): ...
"""
    assert signatures(source) == {
        "f": ["a", "/", "b", "c=1", "*d", "e", "g=None", "**h"],
        "C.__init__": ["self", "*", "x=2"],
        "C.s": ["y='z'"],
    }
