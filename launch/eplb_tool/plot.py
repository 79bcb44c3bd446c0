"""A replay as heat maps: ranks over time in the worst layer, and layers over time."""

from pathlib import Path

from launch.eplb_tool.replay import Replayed
from moe_ep.config import ConfigError, Problem


def draw(found: Replayed, file: Path) -> None:
    """A row for each policy. Raises ConfigError for a kind of file that cannot be written."""
    from matplotlib.figure import Figure

    policies = found.policies
    layer = int(policies[0].balancedness.mean(0).argmin())
    figure = Figure(figsize=(12, 1 + 2.2 * len(policies)), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if file.suffix.lstrip(".") not in known:
        names = ", ".join(f".{name}" for name in sorted(known))
        problem = Problem("plot", str(file), f"a name that ends in {names}", "Rename it.")
        raise ConfigError([problem])
    axes = figure.subplots(len(policies), 2, squeeze=False)
    relative = [
        policy.tokens[:, layer] / policy.tokens[:, layer].mean(1, keepdim=True).clamp(min=1e-9)
        for policy in policies
    ]
    highest = max(float(values.max()) for values in relative)
    for (left, right), policy, values in zip(axes, policies, relative, strict=True):
        loads = left.imshow(
            values.T.numpy(), aspect="auto", cmap="coolwarm", vmin=2 - highest, vmax=highest
        )
        balance = right.imshow(policy.balancedness.T.numpy(), aspect="auto", vmin=0, vmax=1)
        left.set(title=f"{policy.name}: rank's load over the mean, layer {layer}", ylabel="rank")
        right.set(title=f"{policy.name}: balancedness", ylabel="layer")
        figure.colorbar(loads, ax=left)
        figure.colorbar(balance, ax=right)
    for bottom in axes[-1]:
        bottom.set_xlabel(f"window of {found.window} steps, from the second on")
    figure.savefig(file, dpi=100)
