"""The attention core in plain torch, fast on CPUs; the two paths have a file each."""

from dataclasses import dataclass

import torch

from attention.base import AttentionBackend, AttentionBatch, AttentionPlan, AttentionSpec
from attention.torch_decode import DecodeWork, plan_decode, run_decode
from attention.torch_prefill import Expansion, PrefillWork, plan_prefills, run_prefill


@dataclass(frozen=True)
class TorchPlan(AttentionPlan):
    decode: DecodeWork | None
    prefills: tuple[PrefillWork, ...]


class TorchAttention(AttentionBackend):
    """Absorb and expand path over batched matrix products."""

    def __init__(self, spec: AttentionSpec, *, device: torch.device | str = "cpu") -> None:
        if reason := self.supports(spec):
            raise ValueError(reason)
        self.spec = spec
        self.device = torch.device(device)

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.dtype not in (torch.float32, torch.bfloat16):
            return f"torch attention computes in float32 or bfloat16, not {spec.dtype}"
        return None

    def plan(self, batch: AttentionBatch) -> TorchPlan:
        decode = None
        if batch.num_decodes:
            decode = plan_decode(batch, self.spec.dtype, self.device)
        return TorchPlan(
            num_tokens=batch.num_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            decode=decode,
            prefills=tuple(plan_prefills(batch, self.device)),
        )

    def decode(self, *, q: torch.Tensor, cache: torch.Tensor, plan: TorchPlan) -> torch.Tensor:
        assert plan.decode is not None, "this step has no decodes"
        return run_decode(q=q, cache=cache, work=plan.decode, spec=self.spec)

    def prefill(
        self,
        *,
        q: torch.Tensor,
        latent: torch.Tensor,
        cache: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        plan: TorchPlan,
    ) -> torch.Tensor:
        expand = Expansion(w_uk, w_uv, self.spec)
        return run_prefill(q=q, latent=latent, cache=cache, expand=expand, works=plan.prefills)
