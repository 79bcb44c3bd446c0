"""How a backend is chosen, and what a name that cannot work says."""

import logging

import pytest
import torch

import attention
from attention import AttentionBackend, AttentionSpec, attention_problem, create_attention
from attention.torch_attention import TorchAttention
from tests.attention.cases import make_spec


class Picky(TorchAttention):
    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return "needs 512 + 64" if spec.latent_dim != 576 else None


def missing_library() -> type[AttentionBackend]:
    raise ImportError("No module named 'some_kernels'")


@pytest.fixture
def three_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {"picky": lambda: Picky, "missing": missing_library, "torch": lambda: TorchAttention}
    monkeypatch.setattr(attention, "_BACKENDS", backends)


@pytest.mark.usefixtures("three_backends")
def test_auto_takes_the_first_that_can_and_logs_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        backend = create_attention("auto", make_spec())
    assert type(backend) is TorchAttention
    assert "attention backend torch" in caplog.text
    assert "picky: needs 512 + 64" in caplog.text
    assert "missing: its library cannot be imported" in caplog.text
    spec = make_spec(kv_lora_rank=512, qk_rope_head_dim=64)
    assert type(create_attention("auto", spec)) is Picky


@pytest.mark.usefixtures("three_backends")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("picky", "picky: needs 512 \\+ 64"),
        ("missing", "No module named 'some_kernels'"),
        ("flash", "'flash' cannot be used"),
    ],
)
def test_a_name_that_cannot_work_says_what_can(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        create_attention(name, make_spec())
    assert "torch: can be used" in str(error.value)


def test_nothing_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BACKENDS", {"missing": missing_library})
    with pytest.raises(ValueError, match="'auto' cannot be used here \\(missing: its library"):
        create_attention("auto", make_spec())


def test_unsupported_dtype() -> None:
    spec = make_spec(torch.float16)
    problem = attention_problem("torch", spec)
    assert problem is not None
    assert "not torch.float16" in problem
    with pytest.raises(ValueError, match="float16"):
        TorchAttention(spec)


def test_unknown_name() -> None:
    assert attention_problem("flash", make_spec()) == "no such attention backend"
