"""Where weights come from: the interface that the decoder is built from, and made-up weights.

The decoder asks for each tensor that it needs, and for each expert that the placement gives this
rank; nothing else is read. Which rank needs what is not known here.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass

import torch

from moe_ep.config import ModelConfig
from moe_ep.experts.base import ExpertWeights
from moe_ep.fp8 import dequantize_blocks, quantize_blocks
from moe_ep.model.checkpoint import LoadError
from moe_ep.model.tensor_names import Shape, expected_tensors, expert_of

_DUMMY_STD = 0.02  # the initializer_range of every family


@dataclass(frozen=True)
class LoadReport:
    """What became of every tensor of a checkpoint, scales included, by the names in its files.

    loaded: read on this rank. other_ranks: of experts that this rank has not asked for.
    ignored: name -> why it plays no part. unexpected: not of this model, and no reason known.
    missing: what every rank needs and this one has not loaded. bytes_read: of total_bytes.
    """

    loaded: tuple[str, ...]
    other_ranks: tuple[str, ...]
    ignored: dict[str, str]
    unexpected: tuple[str, ...]
    missing: tuple[str, ...]
    bytes_read: int
    total_bytes: int

    def __str__(self) -> str:
        reasons = Counter(self.ignored.values())
        parts = [
            f"loaded {len(self.loaded)} tensors",
            f"{self.bytes_read / 1e6:,.1f} of {self.total_bytes / 1e6:,.1f} MB read",
            f"{len(self.other_ranks)} tensors of other ranks",
            *(f"{count} ignored ({why})" for why, count in reasons.items()),
            f"unexpected: {', '.join(self.unexpected) or 'none'}",
            f"missing: {', '.join(self.missing) or 'none'}",
        ]
        return "; ".join(parts)


class WeightSource(ABC):
    """Tensors by their checkpoint names, without the prefix of a multimodal checkpoint."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""

    @abstractmethod
    def raw(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A new tensor as it is stored, and its float32 scales per 128x128 block when it is FP8.

        LoadError for a name that is not there.
        """

    @abstractmethod
    def report(self) -> LoadReport:
        """What was loaded so far and what was not, for the log."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new dense tensor in ``dtype``; None keeps the stored one, BF16 for FP8 weights."""
        weight, scale = self.raw(name)
        if scale is not None:
            return dequantize_blocks(weight, scale, dtype or torch.bfloat16)
        return weight if dtype is None else weight.to(dtype)

    def optional(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """The tensor, or None when there is none of that name."""
        return self.tensor(name, dtype) if self.has(name) else None

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """A logical expert of a decoder layer (counted from 0), FP8 with its scales kept as is."""
        prefix = f"model.layers.{layer}.mlp.experts.{expert}."
        (gate, gate_scale), (up, up_scale), (down, down_scale) = (
            self.raw(f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down")
        )
        return ExpertWeights(gate, up, down, gate_scale, up_scale, down_scale)


class DummySource(WeightSource):
    """Random weights in a model's shapes and types, for runs without a checkpoint.

    A tensor depends on its name and the seed alone, so all ranks agree and any number of ranks
    gives the same model. Norms are 1, all else is normal with a deviation of 0.02; a model with
    FP8 weights gets FP8 weights.
    """

    def __init__(self, model: ModelConfig, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._expected = expected_tensors(model)
        self._loaded: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._expected

    def raw(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        if name not in self._expected:
            raise LoadError("a dummy model", [f"tensor {name} is missing"])
        self._loaded.add(name)
        shape = self._expected[name]
        dtype: torch.dtype = getattr(torch, self._model.dtype)
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype), None
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        weight = (torch.randn(shape, generator=generator) * _DUMMY_STD).to(dtype)
        return quantize_blocks(weight) if self._is_fp8(name, shape) else (weight, None)

    def report(self) -> LoadReport:
        others = [n for n in self._expected if n not in self._loaded]
        return LoadReport(
            loaded=tuple(sorted(self._loaded)),
            other_ranks=tuple(name for name in others if expert_of(name) is not None),
            ignored={},
            unexpected=(),
            missing=tuple(name for name in others if expert_of(name) is None),
            bytes_read=0,
            total_bytes=0,
        )

    def _is_fp8(self, name: str, shape: Shape) -> bool:
        """Published FP8 checkpoints keep embedding, head, router and everything flat as it was."""
        wide = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
        return self._model.quantization is not None and len(shape) == 2 and not name.endswith(wide)
