"""Reads the signatures of the GPU libraries out of their published wheels into ``manifest/``.

    python -m tests.emulators.extract_manifest

Downloads the wheels that the ``gpu`` extra in ``pyproject.toml`` names (no dependencies, nothing is
installed or imported) and parses their Python sources and stubs. Run it after changing a version
there: a difference in ``manifest/`` is a change of an interface that the stand-ins must follow.
"""

import ast
import hashlib
import json
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
MANIFEST = HERE / "manifest"
PYPROJECT = HERE.parent.parent / "pyproject.toml"
PYTHON, PLATFORM = "3.12", "manylinux_2_28_x86_64"

# Import name and the sources that define what users call, by distribution.
LIBRARIES = {
    "tokenspeed-deepep": (
        "deep_ep",
        ("deep_ep/buffers/legacy.py", "deep_ep/buffers/elastic.py", "deep_ep/utils/event.py"),
    ),
    "tokenspeed-deepgemm": (
        "deep_gemm",
        (
            "deep_gemm/_C.pyi",
            "deep_gemm/utils/math.py",
            "deep_gemm/testing/numeric.py",
        ),
    ),
    "tokenspeed-flashmla": ("flash_mla", ("flash_mla/flash_mla_interface.py",)),
}


def main() -> None:
    MANIFEST.mkdir(exist_ok=True)
    for requirement in gpu_requirements():
        distribution, version = requirement.split("==")
        if distribution in LIBRARIES:
            name, sources = LIBRARIES[distribution]
            wheel_name, data = download(requirement)
            manifest = {
                "distribution": distribution,
                "version": version,
                "wheel": wheel_name,
                "sha256": hashlib.sha256(data).hexdigest(),
                "sources": read_sources(data, sources),
            }
            text = json.dumps(manifest, indent=1)
            (MANIFEST / f"{name}.json").write_text(text + "\n", encoding="utf-8")
            print(f"{name}: {wheel_name}")


def gpu_requirements() -> list[str]:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    return project["optional-dependencies"]["gpu"]


def download(requirement: str) -> tuple[str, bytes]:
    """The wheel's file name and content."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--python-version", PYTHON, "--platform", PLATFORM]
        subprocess.run([*command, "--dest", folder, requirement], check=True)
        (wheel,) = Path(folder).iterdir()
        return wheel.name, wheel.read_bytes()


def read_sources(wheel: bytes, paths: tuple[str, ...]) -> dict[str, dict[str, list[str]]]:
    """Signatures by qualified name, by path in the wheel."""
    with tempfile.TemporaryFile() as file:
        file.write(wheel)
        with zipfile.ZipFile(file) as archive:
            return {path: signatures(archive.read(path).decode()) for path in paths}


def signatures(source: str) -> dict[str, list[str]]:
    """The parameters, as written without annotations, of public functions and methods."""
    return {name: parameters(node.args) for name, node in _functions(ast.parse(source))}


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                is_public = isinstance(member, ast.FunctionDef) and (
                    not member.name.startswith("_") or member.name == "__init__"
                )
                if is_public:
                    assert isinstance(member, ast.FunctionDef)
                    yield f"{node.name}.{member.name}", member


def parameters(arguments: ast.arguments) -> list[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    defaults = [None] * num_required + list(arguments.defaults)
    listed = [_parameter(a, d) for a, d in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        listed.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        listed.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        listed.append("*")
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    listed += [_parameter(a, d) for a, d in keyword_only]
    if arguments.kwarg:
        listed.append(f"**{arguments.kwarg.arg}")
    return listed


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


if __name__ == "__main__":
    main()
