"""Where a rank stands in its step: for a wait that runs out of time, and for whoever times stages.

Every piece of a step begins with ``enter``, so that the pieces tile the step without a gap.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Stage(StrEnum):
    """The pieces of a step, in the order in which a step meets them."""

    LOADING = "loading"
    ASLEEP = "asleep"
    SCHEDULING = "scheduling"
    STEP_SHAPE = "step shape"
    BALANCING = "moving experts"
    INPUTS = "inputs"
    EMBEDDING = "embedding"
    NORMS = "norms and glue"
    ATTENTION_PROJECTIONS = "attention projections"
    ATTENTION_CORE = "attention core"
    ATTENTION_OUTPUT = "attention output"
    DENSE_MLP = "dense mlp"
    GATE = "gate"
    DISPATCH_SEND = "dispatch send"
    DISPATCH_COUNTS = "dispatch counts"
    SHARED_EXPERT = "shared expert"
    DISPATCH_WAIT = "dispatch wait"
    DISPATCH_LAYOUT = "dispatch layout"
    EXPERTS = "expert GEMMs"
    COMBINE_SEND = "combine send"
    COMBINE_WAIT = "combine wait"
    COMBINE_SUMS = "combine sums"
    GRAPH = "graph replay"
    HEAD = "head"
    SAMPLING = "sampling"
    OUTPUTS = "outputs"


@dataclass
class Progress:
    """Written by the rank's own loop, read by anyone at any time.

    layer: index of the decoder layer, None outside the layers. stage: what the rank is doing.
    micro_batch: which of the step's one or two it does it for. num_tokens: real tokens of this rank
    in the step. listener: called after every ``enter``, when there is one.
    """

    step: int = 0
    layer: int | None = None
    stage: Stage = Stage.LOADING
    micro_batch: int = 0
    num_tokens: int = 0
    listener: Callable[["Progress"], None] | None = field(default=None, repr=False, compare=False)

    def enter(self, stage: Stage, *, layer: int | None = None, micro_batch: int = 0) -> None:
        """What was done until now ends here, and ``stage`` begins."""
        self.layer, self.stage, self.micro_batch = layer, stage, micro_batch
        if self.listener is not None:
            self.listener(self)

    def enter_within(self, stage: Stage) -> None:
        """``enter`` for the same layer and micro-batch."""
        self.enter(stage, layer=self.layer, micro_batch=self.micro_batch)

    def snapshot(self) -> "Progress":
        """A copy that stays as it is and can travel to another process."""
        return replace(self, listener=None)

    def describe(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"step {self.step}{layer}, stage {self.stage}, {self.num_tokens} tokens"


class Track:
    """One micro-batch's way through the layers: it knows where it is after another's turn."""

    def __init__(self, progress: Progress, micro_batch: int = 0) -> None:
        self.progress = progress
        self.micro_batch = micro_batch
        self.layer: int | None = None

    def enter(self, stage: Stage) -> None:
        self.progress.enter(stage, layer=self.layer, micro_batch=self.micro_batch)
