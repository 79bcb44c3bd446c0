"""House rules that hold for the whole tree: who may import whom, and that imports do no work."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("moe_ep", "attention", "eplb", "launch", "bench")
GPU_LIBRARIES = ("deep_ep", "deep_gemm", "flash_mla", "triton")

# Layers from the bottom up; a module may import its own layer and those before it.
LAYERS = [
    ("eplb", "moe_ep.config", "moe_ep.progress", "moe_ep.recorder"),
    ("attention", "moe_ep.fp8", "moe_ep.linear", "moe_ep.gate", "moe_ep.dispatch.base"),
    ("moe_ep.kernels",),
    ("moe_ep.fp8_rows",),
    ("moe_ep.dispatch",),
    ("moe_ep.deep_gemm_library", "moe_ep.linear_fp8"),
    ("moe_ep.experts",),
    ("moe_ep.router",),
    ("moe_ep.layer", "moe_ep.overlap"),
    ("moe_ep.model",),
    ("moe_ep.engine",),
    ("launch",),
    ("bench",),
]
# Triton compiles module-level functions only, so these modules import it when they are imported;
# which happens inside the functions that launch their kernels, and nowhere else.
KERNEL_MODULES = (
    "attention.triton_kernels",
    "attention.triton_latent",
    "attention.triton_prefill",
    "moe_ep.kernels.",
)
# `from moe_ep import LLM` is what users type, so the package's door opens upwards, lazily.
EXEMPT = {"moe_ep"}


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules() -> dict[str, Path]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {_module_name(path): path for path in paths}


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name for name in found if name.split(".")[0] in PACKAGES}


def _imports_when_imported(path: Path) -> set[str]:
    """Names of modules that are imported outside of functions and type checking."""
    found: set[str] = set()
    pending: list[ast.stmt] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.If):
            pending += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
            ]
    return found


def _layer(module: str) -> int | None:
    for index, prefixes in enumerate(LAYERS):
        if any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes):
            return index
    return None


def test_every_module_has_a_layer():
    unplaced = [m for m in _modules() if m not in EXEMPT and _layer(m) is None]
    assert unplaced == []


def test_imports_point_one_way():
    wrong = []
    for module, path in _modules().items():
        own = _layer(module)
        for imported in _imports(path) if module not in EXEMPT else ():
            other = _layer(imported)
            if own is not None and other is not None and other > own:
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_eplb_and_attention_know_nothing_of_the_engine():
    wrong = [
        f"{module} imports {imported}"
        for module, path in _modules().items()
        if module.split(".")[0] in ("eplb", "attention")
        for imported in _imports(path)
        if imported.split(".")[0] != module.split(".")[0]
    ]
    assert wrong == []


def test_kernels_are_imported_where_they_are_launched():
    wrong = [
        f"{module} imports {imported}"
        for module, path in _modules().items()
        if not module.startswith(KERNEL_MODULES)
        for imported in _imports_when_imported(path)
        if imported.startswith((*KERNEL_MODULES, "triton"))
    ]
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_touches_no_device_and_no_gpu_library(package: str):
    modules = [
        m for m in _modules() if m.split(".")[0] == package and not m.startswith(KERNEL_MODULES)
    ]
    code = f"""
import importlib, os, sys
before = dict(os.environ)
for name in {modules!r}:
    importlib.import_module(name)
assert dict(os.environ) == before, "an import changed the environment"
loaded = [lib for lib in {GPU_LIBRARIES!r} if lib in sys.modules]
assert not loaded, loaded
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
