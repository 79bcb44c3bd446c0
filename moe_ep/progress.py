"""Where a rank stands in its step, so that a wait that runs out of time can tell for every rank."""

from dataclasses import dataclass


@dataclass
class Progress:
    """Written by the rank's own loop, read by anyone at any time.

    layer: index of the decoder layer, None outside the layers. stage: what the rank is doing.
    num_tokens: real tokens of this rank in the step.
    """

    step: int = 0
    layer: int | None = None
    stage: str = "start"
    num_tokens: int = 0

    def describe(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"step {self.step}{layer}, stage {self.stage}, {self.num_tokens} tokens"
