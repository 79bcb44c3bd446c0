"""What the demo measured, from the client's side, and the table that shows it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from moe_ep.engine.engine import RankStatus

PERCENTILES = (50, 90, 99)


@dataclass
class Answer:
    """One request as its client saw it. Times are of one monotonic clock, in seconds."""

    kind: str
    prompt: str
    text: str = ""
    num_tokens: int = 0
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    is_finished: bool = False
    error: str | None = None

    def take(self, event: dict[str, Any], now_s: float) -> None:
        """One server-sent event."""
        if "error" in event:
            self.error = event["error"]["message"]
            return
        (choice,) = event["choices"]
        self.text += choice["text"]
        self.num_tokens += len(choice["token_ids"])
        self.first_s = now_s if self.first_s is None else self.first_s
        self.last_s = now_s
        self.is_finished = choice["finish_reason"] is not None

    @property
    def is_good(self) -> bool:
        return self.error is None and self.is_finished

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        assert self.first_s is not None
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        assert self.first_s is not None
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


@dataclass
class Load:
    """What the ranks said of themselves, over the run. slot_tokens: at its end, by rank, MoE layer
    and slot."""

    peak_kv_blocks: dict[int, int] = field(default_factory=dict)
    last: "list[RankStatus]" = field(default_factory=list)
    slot_tokens: list[list[list[int]]] = field(default_factory=list)

    def add(self, ranks: "list[RankStatus]") -> None:
        self.last = ranks
        for status in ranks:
            peak = self.peak_kv_blocks.get(status.rank, 0)
            self.peak_kv_blocks[status.rank] = max(peak, status.kv_blocks_used)

    def balancedness(self) -> list[float]:
        """Per MoE layer the mean over ranks of tokens processed by experts, over the most of any
        rank: 1 is even, 1 / num_ranks is one rank doing everything."""
        tokens = np.array([[sum(layer) for layer in rank] for rank in self.slot_tokens])
        return list(tokens.mean(axis=0) / tokens.max(axis=0).clip(min=1))


def report(answers: Sequence[Answer], load: Load) -> int:
    """Print the table; 1 when a request failed, else 0."""
    from rich.console import Console

    console = Console()
    failed = [answer for answer in answers if not answer.is_good]
    for answer in failed:
        console.print(f"failed ({answer.kind}): {answer.error or 'the stream broke off'}")
    good = [answer for answer in answers if answer.is_good]
    if good:
        console.print(_table(good, load))
    return 1 if failed else 0


def _table(answers: Sequence[Answer], load: Load):
    from rich.table import Table

    table = Table(title="moe-ep demo", title_justify="left", show_header=False)
    seconds = max(a.last_s for a in answers) - min(a.sent_s for a in answers)
    num_tokens = sum(answer.num_tokens for answer in answers)
    table.add_row("requests", f"{len(answers)} answered, {num_tokens} tokens in {seconds:.1f} s")
    table.add_row("tokens/s", f"{num_tokens / seconds:.1f}")
    table.add_row("TTFT p50 / p90 / p99, ms", _milliseconds([a.ttft_s for a in answers]))
    table.add_row("TPOT p50 / p90 / p99, ms", _milliseconds([a.tpot_s for a in answers]))
    for status in load.last:
        used, total = load.peak_kv_blocks[status.rank], status.kv_blocks_total
        table.add_row(f"KV of rank {status.rank}, peak", f"{used} of {total} blocks")
    for layer, balance in enumerate(load.balancedness()):
        table.add_row(f"expert balancedness, MoE layer {layer}", f"{balance:.3f} (mean / max)")
    return table


def _milliseconds(seconds: Sequence[float]) -> str:
    return " / ".join(f"{1000 * value:.0f}" for value in np.percentile(seconds, PERCENTILES))
