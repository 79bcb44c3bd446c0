"""The attention core on Triton kernels, of decode and, on GPUs, of prefill."""

from dataclasses import dataclass

import torch

from attention.base import AttentionBatch, AttentionSpec, StaticPlan
from attention.decode_items import DecodeItems, StaticItems, plan_items
from attention.gpu_prefill import GpuPrefill
from attention.torch_prefill import PrefillPlan


@dataclass(frozen=True)
class TritonPlan(PrefillPlan):
    decode: DecodeItems | None


class TritonAttention(GpuPrefill):
    """Any latent sizes; several query tokens per decode. See ``attention.triton_kernels``."""

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.dtype not in (torch.float32, torch.bfloat16):
            return f"triton attention computes in float32 or bfloat16, not {spec.dtype}"
        try:
            import triton
        except ImportError as error:
            return f"triton cannot be imported: {error}"
        if not (triton.knobs.runtime.interpret or torch.cuda.is_available()):
            return "triton kernels need a CUDA device (or TRITON_INTERPRET=1, which is for tests)"
        return None

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        return TritonPlan(
            num_tokens=batch.num_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            decode=plan_items(batch, self.device) if batch.num_decodes else None,
            prefills=self.plan_prefills(batch),
        )

    @classmethod
    def capture_problem(cls) -> str | None:
        return None

    def static_plan(
        self, *, num_requests: int, max_blocks: int, num_blocks: int
    ) -> "TritonStaticPlan":
        return TritonStaticPlan(
            StaticItems(
                num_requests=num_requests,
                max_blocks=max_blocks,
                num_blocks=num_blocks,
                device=self.device,
            )
        )

    def decode(self, *, q: torch.Tensor, cache: torch.Tensor, plan: TritonPlan) -> torch.Tensor:
        from attention.triton_kernels import decode

        assert plan.decode is not None, "this step has no decodes"
        return decode(q, cache, plan.decode, self.spec)


class TritonStaticPlan(StaticPlan):
    """Results of padding are not written."""

    def __init__(self, static: StaticItems) -> None:
        self._static = static

    def update(self, batch: AttentionBatch) -> None:
        self._static.update(batch)

    def plan(self) -> TritonPlan:
        items = self._static.items
        return TritonPlan(items.num_requests, items.num_requests, prefills=(), decode=items)
