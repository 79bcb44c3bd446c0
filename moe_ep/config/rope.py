"""Rotary embedding as config.json describes it, in its old and its new fields."""

import math
from dataclasses import dataclass
from typing import Any

from moe_ep.config.fields import FieldReader


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension as ``rope_scaling`` gives it.

    attention_factor: scale of cos and sin; None means derived from the mscales and the factor.
    mscale, mscale_all_dim: None when absent or 0 (both mean "not used").
    truncate: whether the correction range is rounded to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def cos_sin_scale(self) -> float:
        """The factor on cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self.scale_for(1.0)
        return self.scale_for(self.mscale) / self.scale_for(self.mscale_all_dim)

    def scale_for(self, mscale: float) -> float:
        """YaRN's temperature: ``0.1 * mscale * ln(factor) + 1``, and 1 up to factor 1."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


def read_rotary(reader: FieldReader) -> dict[str, Any]:
    """Fields of ModelConfig from ``rope_parameters``, or ``rope_scaling`` and ``rope_theta``."""
    name = "rope_parameters" if reader.get("rope_parameters") is not None else "rope_scaling"
    given = reader.get(name) or {}
    if not isinstance(given, dict):
        reader.refuse(name, "an object or null", "Check the file.")
        given = {}
    rope = FieldReader({"rope_theta": reader.get("rope_theta"), **given}, {}, prefix=f"{name}.")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "yarn"):
        rope.refuse("rope_type", "default or yarn", "No other context extension is implemented.")
    for part in (rope, reader):
        if part.get("partial_rotary_factor") not in (None, 1, 1.0):
            part.refuse("partial_rotary_factor", "1.0", "qk_rope_head_dim is rotated as a whole.")
    positions = reader.integer("max_position_embeddings")
    values = {
        "rope_theta": rope.real("rope_theta"),
        "rope_interleave": reader.boolean("rope_interleave"),
        "yarn": _yarn(rope, positions) if kind == "yarn" else None,
    }
    reader.problems += rope.problems
    return values


def _yarn(rope: FieldReader, positions: int) -> YarnConfig:
    original = rope.optional_integer("original_max_position_embeddings") or positions
    return YarnConfig(
        factor=rope.optional_real("factor") or positions / original,
        original_max_position_embeddings=original,
        beta_fast=rope.optional_real("beta_fast") or 32.0,
        beta_slow=rope.optional_real("beta_slow") or 1.0,
        mscale=rope.optional_real("mscale") or None,
        mscale_all_dim=rope.optional_real("mscale_all_dim") or None,
        attention_factor=rope.optional_real("attention_factor"),
        truncate=rope.get("truncate") is not False,
    )
