"""The V3-shaped decoder: MLA attention and mixture-of-experts layers, decided by config fields.

Shape letters: T tokens of this rank's (micro-)batch, H hidden, V vocabulary.

The forward pass is written once, as a generator that yields wherever communication is in flight
(``moe_ep.overlap`` drives it). It knows neither requests nor how batches are made.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from attention.latent_cache import LatentCache
from attention.mla import MLA, Projection
from moe_ep.dispatch.base import Mode
from moe_ep.layer import MoELayer
from moe_ep.linear import Linear
from moe_ep.model.norm import RMSNorm
from moe_ep.model.rope import RotaryEmbedding
from moe_ep.progress import Progress, Stage, Track


@dataclass(frozen=True)
class StepInput:
    """One micro-batch of one step.

    token_ids, positions, slot_mapping: int64 ``[T]``; slot_mapping is the token's place in the
    cache (block * 64 + offset), -1 for padding. num_tokens: int32 ``[1]``: so many rows are real,
    the others padding. All on the device, so that a captured step can be given other tokens.
    attention_plan: made by the attention backend for these tokens. micro_batch: which of the step's
    one or two this is. last: when given, the only tokens whose last hidden states are needed.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    num_tokens: torch.Tensor
    attention_plan: Any
    mode: Mode
    micro_batch: int = 0
    last: "LastTokens | None" = None


@dataclass(frozen=True)
class LastTokens:
    """The tokens of a step that go through the last layer, as a step of their own.

    rows: int64 ``[N]``, which of the step's tokens they are. step: these alone, each a decode, as
    all that comes before a token is in the cache by then.
    """

    rows: torch.Tensor
    step: StepInput


class DenseMLP:
    """SwiGLU feed-forward network; also the shared expert. gate_up: ``[T, H] -> [T, 2I]``, gate
    first. down: ``[T, I] -> [T, H]``."""

    def __init__(self, gate_up: Projection, down: Projection) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


@dataclass(frozen=True)
class DecoderLayer:
    """Attention and feed-forward network, each behind a norm; the first layers have a dense one."""

    input_norm: RMSNorm
    attention: MLA
    post_attention_norm: RMSNorm
    mlp: DenseMLP | MoELayer

    def forward(
        self,
        x: torch.Tensor,
        *,
        attend: Callable[[MLA, torch.Tensor], torch.Tensor],
        is_padding: torch.Tensor,
        mode: Mode,
        track: Track,
    ) -> Generator[None, None, torch.Tensor]:
        track.enter(Stage.NORMS)
        normed = self.input_norm(x)
        attended = attend(self.attention, normed)
        track.enter(Stage.NORMS)
        x = x + attended
        normed = self.post_attention_norm(x)
        if isinstance(self.mlp, MoELayer):
            out = yield from self.mlp.forward(normed, is_padding, mode, track)
        else:
            track.enter(Stage.DENSE_MLP)
            out = self.mlp(normed)
            track.enter(Stage.NORMS)
        return x + out


class Decoder:
    """All layers of one rank, over one latent cache."""

    def __init__(
        self,
        *,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        final_norm: RMSNorm,
        lm_head: Linear,
        rope: RotaryEmbedding,
        progress: Progress,
    ) -> None:
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.rope = rope
        self.progress = progress

    @property
    def moe_layers(self) -> list[MoELayer]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoELayer)]

    def forward(self, step: StepInput, cache: LatentCache) -> Generator[None, None, torch.Tensor]:
        """Return the last hidden states: ``[T, H]``, padding unspecified, or ``[N, H]`` of the
        tokens of ``step.last``."""
        track = Track(self.progress, step.micro_batch)
        track.enter(Stage.EMBEDDING)
        x = F.embedding(step.token_ids, self.embedding)
        if step.last is None:
            return (yield from self._layers(x, step, cache, range(len(self.layers)), track))
        final = len(self.layers) - 1
        x = yield from self._layers(x, step, cache, range(final), track)
        self._store_latents(x, step, cache, final, track)
        x = x[step.last.rows]
        return (yield from self._layers(x, step.last.step, cache, range(final, final + 1), track))

    def _layers(
        self, x: torch.Tensor, step: StepInput, cache: LatentCache, indices: range, track: Track
    ) -> Generator[None, None, torch.Tensor]:
        cos, sin = self.rope.cos_sin(step.positions)
        is_padding = torch.arange(len(x), device=x.device) >= step.num_tokens
        for index in indices:
            track.layer = index

            def attend(mla: MLA, normed: torch.Tensor, index: int = index) -> torch.Tensor:
                return mla.forward(
                    normed,
                    cos=cos,
                    sin=sin,
                    cache=cache,
                    layer_idx=index,
                    slot_mapping=step.slot_mapping,
                    plan=step.attention_plan,
                    enter=lambda part: track.enter(Stage(part)),
                )

            x = yield from self.layers[index].forward(
                x, attend=attend, is_padding=is_padding, mode=step.mode, track=track
            )
        return x

    def _store_latents(
        self, x: torch.Tensor, step: StepInput, cache: LatentCache, index: int, track: Track
    ) -> None:
        """What later tokens will attend to in a layer that these do not go through."""
        track.layer = index
        track.enter(Stage.ATTENTION_PROJECTIONS)
        layer = self.layers[index]
        cos, sin = self.rope.cos_sin(step.positions)
        layer.attention.store(
            layer.input_norm(x),
            cos=cos,
            sin=sin,
            cache=cache,
            layer_idx=index,
            slot_mapping=step.slot_mapping,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 ``[N, V]`` for chosen rows ``[N, H]`` of the last hidden states."""
        return self.lm_head(self.final_norm(hidden)).float()
