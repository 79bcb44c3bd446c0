"""What the user asks; what is wrong with it is told by ``checks``."""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moe_ep.config import EngineConfig, ModelConfig

DEFAULT_BATCHED_TOKENS: int = EngineConfig(model="").max_num_batched_tokens


@dataclass(frozen=True)
class Question:
    """batch: requests of a rank in a step; in prefill, prompts that arrive together. context:
    cached tokens of a request in decode, tokens of a prompt in prefill. imbalance: rows of the
    busiest rank over the mean, None for the published one of this EP size. expert_load: file with
    recorded loads of experts, which gives the imbalance. mtp_tokens: drafted tokens per step.
    mtp_acceptance: chance that a drafted token is accepted when those before it were.
    max_num_batched_tokens: of a step, None for the room that the batch needs. prefill_load: share
    of its time in which a prefill engine is busy, which gives the time that prompts wait."""

    model: str
    gpu: str = "h800"
    fabric: str | None = None
    ep_size: int = 8
    attn_dp_size: int | None = None
    ep_num_redundant_experts: int = 0
    batch: int = 64
    context: int = 4096
    phase: str = "decode"
    enable_two_batch_overlap: bool = False
    imbalance: float | None = None
    expert_load: Path | None = None
    mtp_tokens: int = 0
    mtp_acceptance: float = 0.85
    max_num_batched_tokens: int | None = None
    prefill_load: float = 0.7
    kv_cache_dtype: str = "bfloat16"
    moe_a2a_backend: str = "deepep"
    gpu_memory_utilization: float = 0.9

    @property
    def queries(self) -> int:
        """Query tokens of a request: of a step in decode, of its prompt in prefill."""
        return 1 + self.mtp_tokens if self.phase == "decode" else self.context

    @property
    def capacity(self) -> int:
        """Most tokens of a rank in a step in which no rank prefills."""
        return self.batch * self.queries if self.phase == "decode" else self.batch

    @property
    def accepted(self) -> float:
        """Tokens that a request gains in a decode step."""
        return sum(self.mtp_acceptance**i for i in range(self.mtp_tokens + 1))

    @property
    def batched_tokens(self) -> int:
        """Of the engine: as given, else room for the batch, and the default at least, so that it
        can prefill."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(DEFAULT_BATCHED_TOKENS, self.batch * self.queries)

    @property
    def step_tokens(self) -> int:
        """Query tokens of a rank in a step; fewer in the last one of a batch that takes several."""
        return min(self.batch * self.queries, self.batched_tokens)

    @property
    def num_steps(self) -> int:
        """Steps that the batch takes: 1 in decode, in prefill as many as there are chunks."""
        return math.ceil(self.batch * self.queries / self.step_tokens)

    @property
    def backend(self) -> str:
        return "local" if self.ep_size == 1 else self.moe_a2a_backend

    @property
    def is_balanced(self) -> bool:
        """Whether redundant experts are taken to be re-placed while the service runs, for want of
        anything better known about the load."""
        is_unknown = self.imbalance is None and self.expert_load is None
        return is_unknown and self.ep_num_redundant_experts > 0


@cache
def read_model(name: str) -> ModelConfig:
    """Raises ConfigError."""
    return ModelConfig.from_path(name)
