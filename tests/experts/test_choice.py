"""How an expert backend is chosen: by name, by ``auto``, and what a wrong name says."""

import pytest
import torch

import moe_ep.experts
from moe_ep.experts import BACKENDS, ExpertSpec, create_experts, resolve_backend
from moe_ep.experts.torch_experts import TorchExperts

GOOD = ExpertSpec(num_slots=2, hidden=64, intermediate=32, dtype=torch.bfloat16, is_fp8=True)
BAD = ExpertSpec(num_slots=2, hidden=64, intermediate=32, dtype=torch.float16, is_fp8=True)


class Refusing(TorchExperts):
    @classmethod
    def supports(cls, spec: ExpertSpec) -> str | None:
        return "needs a device that is not here"


def _missing() -> type[TorchExperts]:
    raise ImportError("no module named nothing")


@pytest.fixture
def two_that_cannot(monkeypatch):
    backends = {"refusing": lambda: Refusing, "missing": _missing, **BACKENDS}
    monkeypatch.setattr(moe_ep.experts, "BACKENDS", backends)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_the_torch_backend_is_made(name):
    experts = create_experts(name, GOOD)
    assert isinstance(experts, TorchExperts)
    assert experts.spec == GOOD


@pytest.mark.usefixtures("two_that_cannot")
def test_auto_passes_over_what_cannot_work_and_says_why():
    backend, reason = resolve_backend("auto", GOOD)
    assert backend == "torch"
    assert "refusing: needs a device that is not here" in reason
    assert "missing: its library cannot be imported: no module named nothing" in reason


@pytest.mark.usefixtures("two_that_cannot")
@pytest.mark.parametrize("name", ["cutlass", "refusing", "missing"])
def test_a_name_that_cannot_work_lists_all_backends_and_why(name):
    with pytest.raises(ValueError, match=repr(name)) as failure:
        create_experts(name, GOOD)
    assert "refusing: needs a device that is not here" in str(failure.value)
    assert "missing: its library cannot be imported" in str(failure.value)
    assert "torch: works" in str(failure.value)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_spec_that_nothing_serves_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=r"torch\.float16 given, torch experts compute in"):
        create_experts(name, BAD)


@pytest.mark.parametrize("field", ["num_slots", "hidden", "intermediate"])
def test_sizes_must_be_positive(field):
    sizes = {"num_slots": 1, "hidden": 8, "intermediate": 8, field: 0}
    spec = ExpertSpec(**sizes, dtype=torch.float32, is_fp8=False)
    assert TorchExperts.supports(spec) == f"{field}: 0 given, must be at least 1"
