"""Balancedness over time, as a picture. matplotlib is imported when it is drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.eplb_live_run import Run


def draw(runs: "Sequence[Run]", window: int, file: Path) -> None:
    """Axes for each layer, a line for each run."""
    from matplotlib.figure import Figure

    num_layers = runs[0].rank_tokens.shape[1]
    figure = Figure(figsize=(10, 1 + 1.8 * num_layers), layout="constrained")
    all_axes = figure.subplots(num_layers, 1, sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(all_axes):
        for run in runs:
            balance = run.balance(window)[:, layer].tolist()
            axes.plot([i * window for i in range(len(balance))], balance, label=f"EPLB {run.arm}")
        axes.axvline(runs[0].turn, linestyle="--", color="0.5")
        axes.set(ylabel=f"MoE layer {layer}", ylim=(0, 1))
    figure.suptitle(f"mean over maximum of the ranks' tokens, in windows of {window} steps")
    all_axes[-1].set_xlabel("step; dashed: the first code")
    all_axes[-1].legend(loc="lower right")
    figure.savefig(file, dpi=100)
