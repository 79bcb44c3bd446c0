"""The attention contract: plan once per step, run once per layer.

Shape letters: T tokens, D decode tokens, P prefill tokens, N heads, B requests.

The first ``num_decodes`` requests of a batch are decodes on the absorb path (queries projected into
the latent space, one latent row per cached token); the others are prefill chunks on the expand path
(keys and values rebuilt from the latent). Both give the same result within rounding.
"""

from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass
from typing import Any

import torch

BLOCK_SIZE = 64  # tokens per cache block; FlashMLA's dense decode accepts no other page size


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes of one model's MLA attention on this rank."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    dtype: torch.dtype

    @property
    def latent_dim(self) -> int:
        """Values cached per token and layer: the compressed latent, then the rotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class AttentionBatch:
    """What one step attends to, in token order: decodes first, then prefill chunks.

    query_lens: new tokens per request. context_lens: tokens already in the cache before this step.
    block_tables: cache blocks per request, enough for context plus query; each an ``array("i")``.
    num_padded_tokens: T of the step's tensors; rows past ``sum(query_lens)`` are padding.
    """

    num_decodes: int
    query_lens: list[int]
    context_lens: list[int]
    block_tables: "list[array[int]]"
    num_padded_tokens: int

    @property
    def has_prefills(self) -> bool:
        return self.num_decodes < len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_decode_tokens(self) -> int:
        return sum(self.query_lens[: self.num_decodes])


@dataclass(frozen=True)
class AttentionPlan:
    """What every backend's plan says about a step; the rest of it is the backend's own.

    num_tokens: real tokens, of which the first ``num_decode_tokens`` take the absorb path.
    """

    num_tokens: int
    num_decode_tokens: int


class StaticPlan(ABC):
    """What captured decode steps attend to: tensors that stay where they are and change content.

    Made for B requests with one new token each.
    """

    @abstractmethod
    def update(self, batch: AttentionBatch) -> None:
        """Take over a step's decodes, one new token each, at most B of them; there are no prefills.

        What comes after them in the step is padding, for which nothing of the cache is read.
        """

    @abstractmethod
    def plan(self) -> AttentionPlan:
        """A plan of B decode tokens over these tensors, for one forward pass; results of padding
        are unspecified. Call it where the pass is captured: what the device computes once per pass
        is captured with it, and not what an earlier pass has computed.
        """


class AttentionBackend(ABC):
    """Runs the attention core of every layer over a plan made once per step."""

    @abstractmethod
    def __init__(self, spec: AttentionSpec, *, device: torch.device | str) -> None:
        """device: where the tensors of every step live. ValueError when the spec is unsupported."""

    @classmethod
    @abstractmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """None when this backend can serve the spec, else the reason why not."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Everything about the step that does not depend on the layer.

        Cache positions past a request's context and new tokens, entries of its block table past
        the blocks these need, and blocks of nobody are never read: they may hold NaN.
        """

    @classmethod
    def capture_problem(cls) -> str | None:
        """None when decodes over a static plan can be captured as a graph, else why not."""
        return "its plans and products depend on lengths that the host knows"

    def static_plan(self, *, num_requests: int, max_blocks: int, num_blocks: int) -> StaticPlan:
        """Where ``capture_problem`` gives none: for B = num_requests, all of them padding at first.

        max_blocks: most cache blocks of a request. num_blocks: most of all requests together.
        """
        raise NotImplementedError(self.capture_problem())

    @abstractmethod
    def decode(self, *, q: torch.Tensor, cache: torch.Tensor, plan: Any) -> torch.Tensor:
        """Absorb path. q ``[D, N, latent_dim]``, one layer's cache ``[blocks, 64, 1, latent_dim]``.

        Returns ``[D, N, kv_lora_rank]``. The new tokens' latents are already in the cache; query j
        of a request sees cache positions up to and including its own.
        """

    @abstractmethod
    def prefill(
        self,
        *,
        q: torch.Tensor,
        cache: torch.Tensor,
        w_kv_b: torch.Tensor,
        plan: Any,
    ) -> torch.Tensor:
        """Expand path. q ``[P, N, nope + rope]``, one layer's cache as of ``decode``.

        w_kv_b ``[N, nope + v, kv_lora_rank]``, contiguous, rebuilds keys and values from latents:
        those of the context and of the new tokens, which are in the cache already. They are read in
        bounded pieces merged by log-sum-exp. Returns ``[P, N, v_head_dim]``.
        """
