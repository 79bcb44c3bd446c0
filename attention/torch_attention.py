"""The attention core in plain torch, fast on CPUs; the two paths have a file each."""

from dataclasses import dataclass

import torch

from attention.base import AttentionBatch, AttentionSpec
from attention.products import product_dtype
from attention.torch_decode import DecodeWork, plan_decode, run_decode
from attention.torch_prefill import PrefillPlan, TorchPrefill, plan_prefills


@dataclass(frozen=True)
class TorchPlan(PrefillPlan):
    decode: DecodeWork | None


class TorchAttention(TorchPrefill):
    """Absorb and expand path over batched matrix products."""

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.dtype not in (torch.float32, torch.bfloat16):
            return f"torch attention computes in float32 or bfloat16, not {spec.dtype}"
        return None

    def plan(self, batch: AttentionBatch) -> TorchPlan:
        decode = None
        if batch.num_decodes:
            dtype = product_dtype(self.spec.dtype, self.device)
            decode = plan_decode(batch, dtype, self.device)
        return TorchPlan(
            num_tokens=batch.num_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            decode=decode,
            prefills=tuple(plan_prefills(batch, self.device)),
        )

    def decode(self, *, q: torch.Tensor, cache: torch.Tensor, plan: TorchPlan) -> torch.Tensor:
        assert plan.decode is not None, "this step has no decodes"
        return run_decode(q=q, cache=cache, work=plan.decode, spec=self.spec)
