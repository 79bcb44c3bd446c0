"""Two micro-batches against one, over a link that is slow without using the CPU.

``python -m bench.overlap``. Two ranks, one thread each, exchange over a link that holds every
message for a time per byte, set so that a step's transfers take a given part of the time of its
computation: hiding one behind the other can at best halve the step, when both take equally long.
(The halves' computation takes longer than the whole's, as the fast link shows; so the gain is
largest with transfers a little longer than that.) Over the fast link nothing is held: overlap can
only cost there, and the default threshold must keep it off for small batches. Steps with and
without overlap take turns in one run, so that a change of the machine's speed meets both; the
slowest rank counts. The ranks need a core each that nobody else uses.

The geometry is that of ``bench.decode`` with four wide experts, to all of which a token goes: an
expert then gets about as many rows as one of many ranks does, and half of them are still a product
worth its weights. Tokens travel in BF16 by default, so that either way takes equally long and fits
behind the half of a layer that it may hide behind; in FP8 the way back is twice as long. Where
attention takes much longer than experts, as on CPUs without instructions for BF16, ``--context``
evens them out.

Prints a table, and one JSON object last. ``--plot`` draws two layers of a step, without and with
overlap, over the first slow link of the first case.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from bench.decode import GEOMETRY
from bench.ranks import run_ranks
from bench.slow_link import SlowLink
from bench.steps.plot import draw_timelines
from moe_ep.config import EngineConfig
from moe_ep.config.overlap import DEFAULT_OVERLAP, OverlapRules
from moe_ep.engine.assemble import assemble
from moe_ep.engine.host import prepare_process
from moe_ep.engine.request import EngineRequest, SamplingParams
from moe_ep.engine.step_shape import Vote, derive
from moe_ep.engine.step_times import RankTimes, step_times
from moe_ep.engine.world import World
from moe_ep.recorder import Recorder, create_clock

TIMEOUT_S = 120.0
NUM_RANKS = 2
NUM_TOPK = 4
FEW_EXPERTS = {
    "n_routed_experts": NUM_TOPK,
    "num_experts_per_tok": NUM_TOPK,
    "moe_intermediate_size": 1024,
    "n_group": 1,
    "topk_group": 1,
}
ALWAYS = OverlapRules(decode=0, prefill=0)
PROMPT_TOKENS = 256  # of a prefill step's prompts


@dataclass(frozen=True)
class Row:
    """One comparison; seconds of every step of the slowest rank, without and with overlap.

    tokens: per rank. transfers: their time over that of the step's computation, as set; 0 for the
    fast link. threshold: "forced", or "default" for the engine's own rules. hidden_limit: what
    hiding all that can be hidden would give, where the link is slow: the step without overlap, over
    the longer one of its transfers and the step of halves over the fast link.
    """

    phase: str
    tokens: int
    transfers: float
    threshold: str
    seconds_off: list[float]
    seconds_on: list[float]
    hidden_limit: float | None = None

    @property
    def ratio(self) -> float:
        return statistics.median(self.seconds_off) / statistics.median(self.seconds_on)


class Rank:
    """One rank's engine without its loop: a step at a time, by the rules that the caller gives."""

    def __init__(self, config: EngineConfig, world: World) -> None:
        self.world = world
        self.parts = assemble(config, world)
        self.link = SlowLink(self.parts.dispatcher)
        for layer in self.parts.decoder.moe_layers:
            layer.dispatcher = self.link
        self.recorder = Recorder(self.parts.progress, create_clock(world.device))
        self._num_requests = 0

    def submit(self, num_requests: int, prompt_lens: Sequence[int], max_tokens: int) -> None:
        generator = torch.Generator().manual_seed(self.world.rank)
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
        for index in range(num_requests):
            shape = (prompt_lens[index % len(prompt_lens)],)
            ids = torch.randint(GEOMETRY["vocab_size"], shape, generator=generator).tolist()
            self._num_requests += 1
            request = EngineRequest(str(self._num_requests), tuple(ids), params)
            self.parts.scheduler.add(request)

    def clear(self) -> None:
        for number in range(self._num_requests + 1):
            self.parts.scheduler.abort(str(number))

    def step(self, rules: OverlapRules | None) -> float:
        """Seconds of one step. Collective."""
        parts = self.parts
        dist.barrier(group=self.world.group)
        start = time.perf_counter()
        batch = parts.scheduler.schedule()
        vote = Vote(
            step=0,
            num_decode_tokens=batch.num_decode_tokens,
            num_prefill_tokens=batch.num_prefill_tokens,
            num_largest_part=parts.runner.largest_part(batch) if rules else 0,
        )
        votes = [Vote.decode(vector) for vector in parts.sync.agree(vote.encode())]
        shape = derive(votes, replace(parts.step_rules, overlap=rules))
        assert shape.overlap or rules is not ALWAYS, "the batch cannot be split"
        parts.scheduler.update(batch, parts.runner.run(batch, shape))
        return time.perf_counter() - start


class Comparison:
    """Steps of one phase and batch, on every rank alike."""

    def __init__(self, rank: Rank, phase: str, tokens: int, context: int) -> None:
        self.rank, self.phase, self.tokens, self.context = rank, phase, tokens, context

    def __enter__(self) -> "Comparison":
        if self.phase == "decode":
            half = self.context // 2
            lens = [half + 7 * i % half for i in range(self.tokens)]
            self.rank.submit(self.tokens, lens, max_tokens=512)
            while self.rank.parts.scheduler.num_waiting or self._prefills():
                self.rank.step(None)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.rank.clear()

    def _prefills(self) -> bool:
        return self.rank.parts.scheduler.schedule().num_prefill_tokens > 0

    def step(self, rules: OverlapRules | None) -> float:
        if self.phase == "prefill":
            self.rank.submit(self.tokens // PROMPT_TOKENS, [PROMPT_TOKENS], max_tokens=1)
        return self.rank.step(rules)

    def in_turns(self, rules: Sequence[OverlapRules | None], num_samples: int) -> list[list[float]]:
        """Seconds of the slowest rank, for each of the rules; the first of each warms up."""
        samples: list[list[float]] = [[] for _ in rules]
        for turn in range(num_samples + 1):
            for rule, kept in zip(rules, samples, strict=True):
                seconds = self.step(rule)
                if turn:
                    kept.append(seconds)
        return self._of_slowest_rank(torch.tensor(samples, dtype=torch.float64)).tolist()

    def computation(self, num_samples: int) -> float:
        """Seconds that one step keeps the CPU of the slowest rank busy, whoever else uses it."""
        samples = []
        for _ in range(num_samples):
            start = time.thread_time()
            self.step(None)
            samples.append(time.thread_time() - start)
        median = torch.tensor(statistics.median(samples), dtype=torch.float64)
        return self._of_slowest_rank(median).item()

    def recorded(self, rules: OverlapRules | None) -> list[RankTimes]:
        """One step of all ranks."""
        recorder = self.rank.recorder
        recorder.start()
        self.step(rules)
        return step_times(self.rank.world.gather(recorder.finish()))

    def _of_slowest_rank(self, seconds: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.rank.world.group)
        return seconds


Picture = dict[str, list[RankTimes]]  # steps by title


def compare(
    rank: Rank, phase: str, tokens: int, args: argparse.Namespace
) -> tuple[list[Row], Picture]:
    """Rows of the fast link, and of the slow one with each of the given times; and a step of each
    kind over the first slow link. Collective."""
    link = rank.link
    rows, picture = [], Picture()
    with Comparison(rank, phase, tokens, args.context) as steps:
        before = link.sent_bytes
        steps.step(None)
        num_bytes = link.sent_bytes - before
        computation = steps.computation(args.samples)
        off, on = steps.in_turns([None, DEFAULT_OVERLAP], args.samples)
        rows.append(Row(phase, tokens, 0.0, "default", off, on))
        off, on = steps.in_turns([None, ALWAYS], args.samples)
        rows.append(Row(phase, tokens, 0.0, "forced", off, on))
        halves = statistics.median(on)
        for transfers in args.transfers:
            link.seconds_per_byte = transfers * computation / num_bytes
            off, on = steps.in_turns([None, ALWAYS], args.samples)
            limit = statistics.median(off) / max(transfers * computation, halves)
            rows.append(Row(phase, tokens, transfers, "forced", off, on, limit))
            if args.plot and not picture:
                title = f"{phase}, {tokens} tokens per rank, transfers {transfers}x computation"
                picture[f"{title}: one micro-batch"] = steps.recorded(None)
                picture[f"{title}: two micro-batches"] = steps.recorded(ALWAYS)
        link.seconds_per_byte = 0.0
    return rows, picture


def show(rows: list[Row], console: Console) -> None:
    table = Table("phase", "tokens", "transfers", "threshold", "off ms", "on ms", "ratio", "limit")
    for row in rows:
        off, on = (statistics.median(s) * 1e3 for s in (row.seconds_off, row.seconds_on))
        table.add_row(
            row.phase,
            str(row.tokens),
            f"{row.transfers:.2f}x" if row.transfers else "",
            row.threshold,
            f"{off:.1f}",
            f"{on:.1f}",
            f"{row.ratio:.2f}x",
            f"{row.hidden_limit:.2f}x" if row.hidden_limit else "",
        )
    console.print(table)


def _run(world: World, directory: str, args: argparse.Namespace) -> None:
    prepare_process(1)
    most = max([*args.decode, *(tokens // PROMPT_TOKENS for tokens in args.prefill)])
    config = EngineConfig(
        model=directory,
        load_format="dummy",
        dtype="bfloat16",
        ep_size=NUM_RANKS,
        ep_dispatch_dtype=args.dispatch_dtype,
        max_num_seqs=most,
        max_num_batched_tokens=max(most, *args.prefill, 1024),
        num_kv_blocks=most * 12,
        enable_prefix_caching=False,  # prefills repeat their prompts
    )
    with torch.inference_mode():
        rank = Rank(config, world)
        cases = [("decode", n) for n in args.decode] + [("prefill", n) for n in args.prefill]
        results = [compare(rank, *case, args) for case in cases]
    if world.rank == 0:
        _report([row for rows, _ in results for row in rows], results[0][1], args)


def _report(rows: list[Row], picture: Picture, args: argparse.Namespace) -> None:
    show(rows, Console())
    if args.plot:
        draw_timelines(picture, Path(args.plot))
    result = json.dumps({"rows": [asdict(row) | {"ratio": row.ratio} for row in rows]})
    if args.json:
        Path(args.json).write_text(result + "\n", encoding="utf-8")
    print(result)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="moe-ep bench overlap", description=__doc__)
    parser.add_argument("--decode", type=int, nargs="*", default=[32, 64, 128], help="per rank")
    parser.add_argument("--prefill", type=int, nargs="*", default=[1024], help="tokens per rank")
    parser.add_argument(
        "--transfers",
        type=float,
        nargs="*",
        default=[1.0, 1.25],
        help="time of a step's transfers over a slow link, over that of its computation",
    )
    parser.add_argument("--context", type=int, default=256, help="of decodes: half to all of it")
    parser.add_argument("--layers", type=int, default=9, help="the first one is dense")
    parser.add_argument("--dispatch-dtype", choices=("fp8", "bfloat16"), default="bfloat16")
    parser.add_argument("--samples", type=int, default=10, help="steps of each kind")
    parser.add_argument("--json", help="file for the JSON object")
    parser.add_argument("--plot", help="file for the picture, a PNG")
    args = parser.parse_args(argv)
    if not args.decode and not args.prefill:
        parser.error("--decode or --prefill must name a number of tokens")
    if args.plot and not args.transfers:
        parser.error("--plot shows a step over a slow link: --transfers must name one")
    if args.context < 2:
        parser.error("--context must be at least 2")
    if any(tokens < 1 or tokens % PROMPT_TOKENS for tokens in args.prefill):
        parser.error(f"--prefill takes multiples of {PROMPT_TOKENS}")
    with tempfile.TemporaryDirectory() as directory:
        geometry = GEOMETRY | FEW_EXPERTS | {"num_hidden_layers": args.layers}
        kind = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
        geometry |= kind | {"torch_dtype": "bfloat16"}
        Path(directory, "config.json").write_text(json.dumps(geometry), encoding="utf-8")
        run_ranks(NUM_RANKS, TIMEOUT_S, _run, directory, args)


if __name__ == "__main__":
    main()
