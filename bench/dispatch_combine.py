"""The exchange between ranks: bytes moved against the least this routing allows, and time against a
bare all-to-all of the same bytes, measured in turns in one run.

``python -m bench.dispatch_combine --ranks 2`` prints a table and one JSON object as the last line.

The least: each (token, other rank) pair once with its scales, and one row back. The bare exchange:
two ``all_to_all_single`` of the dispatch's and the combine's messages, from ready buffers to ready
buffers; what is above it is routing, quantising, laying out, adding up, and the exchange of counts.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from bench.ranks import run_ranks
from moe_ep.dispatch import Dispatched, DispatchSpec, Mode
from moe_ep.dispatch.collective import CollectiveDispatcher, Traffic
from moe_ep.engine.world import World
from moe_ep.fp8 import FP8, dequantize_rows, num_blocks

TIMEOUT_S = 60.0
PAYLOADS = {"fp8": FP8, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    mode: str
    payload: str
    tokens: int
    hidden: int
    experts: int
    topk: int
    ranks: int

    @property
    def spec(self) -> DispatchSpec:
        return DispatchSpec(
            hidden=self.hidden,
            num_topk=self.topk,
            num_ranks=self.ranks,
            num_slots_per_rank=self.experts // self.ranks,
            max_tokens_per_rank=self.tokens,
            capacity=self.tokens,
            payload_dtype=PAYLOADS[self.payload],
            out_dtype=torch.bfloat16,
        )

    @property
    def least_row_bytes(self) -> int:
        """One row out, with its scales, and one row back."""
        payload = PAYLOADS[self.payload]
        scales = 4 * num_blocks(self.hidden) if payload == FP8 else 0
        return self.hidden * payload.itemsize + scales + self.hidden * 2


@dataclass(frozen=True)
class Row:
    """One line of the result; bytes per rank and call, times of the slowest rank."""

    shape: Shape
    moved_bytes: int
    least_bytes: int
    exchange_us: float
    exchange_spread_us: float
    bare_us: float
    bare_spread_us: float


class Exchange:
    """One rank's dispatch and combine, without experts, and the bare exchange of the same bytes."""

    def __init__(self, shape: Shape, world: World) -> None:
        assert world.group is not None
        generator = torch.Generator().manual_seed(world.rank)
        self.shape = shape
        self.group = world.group
        self.mode = Mode(shape.mode)
        self.dispatcher = CollectiveDispatcher(shape.spec, world.group)
        self.x = torch.randn(shape.tokens, shape.hidden, generator=generator).bfloat16()
        scores = torch.rand(shape.tokens, shape.experts, generator=generator)
        self.slots = scores.argsort(dim=1)[:, : shape.topk].contiguous()
        self.weights = torch.rand(shape.tokens, shape.topk, generator=generator)
        dispatched = self._dispatch()
        self.y = _values(dispatched).bfloat16()  # the experts do nothing
        self.dispatcher.traffic = Traffic()
        self.check(self.run())
        self.traffic = replace(self.dispatcher.traffic)  # of one call; the original counts on
        self.bare = self._bare_exchange()

    def run(self) -> torch.Tensor:
        dispatched = self._dispatch()
        return self.dispatcher.combine(y=self.y, dispatched=dispatched).wait()

    def check(self, out: torch.Tensor) -> None:
        """Without experts a token comes back times the sum of its weights."""
        expected = self.x.float() * self.weights.sum(dim=1, keepdim=True)
        error = (out.float() - expected).abs().amax(dim=1)
        allowed = 0.08 * expected.abs().amax(dim=1)  # e4m3 keeps 1/16, BF16 partial sums 1/256
        assert bool((error <= allowed).all()), f"wrong rows: {(error > allowed).nonzero().tolist()}"

    def _dispatch(self) -> Dispatched:
        return self.dispatcher.dispatch(
            x=self.x, topk_slots=self.slots, topk_weights=self.weights, mode=self.mode
        ).wait()

    def _bare_exchange(self) -> Callable[[], None]:
        ranks = self.shape.ranks
        mine = torch.tensor([self.traffic.dispatch_bytes, self.traffic.combine_bytes]) // (
            ranks - 1
        )
        dist.all_reduce(mine, group=self.group)  # the same size from all, as the routing is even
        buffers = [
            (torch.zeros(size * ranks, dtype=torch.uint8), [size] * ranks)
            for size in (mine // ranks).tolist()
        ]
        outputs = [torch.empty_like(sent) for sent, _ in buffers]
        group = self.group  # through self it would be a cycle, and the group outlive the rank

        def exchange() -> None:
            for (sent, sizes), received in zip(buffers, outputs, strict=True):
                dist.all_to_all_single(received, sent, sizes, sizes, group=group)

        return exchange


def measure(shape: Shape, world: World, num_samples: int) -> Row:
    """Time both exchanges in turns. Collective; every rank gets the same row."""
    exchange = Exchange(shape, world)
    samples: tuple[list[float], list[float]] = ([], [])
    for index in range(2 * (num_samples + 3)):
        function = (exchange.run, exchange.bare)[index % 2]
        dist.barrier(group=exchange.group)
        start = time.perf_counter()
        function()
        if index >= 6:  # the first three of each warm up
            samples[index % 2].append((time.perf_counter() - start) * 1e6)
    ours, bare = (_slowest(times, exchange.group) for times in samples)
    traffic = exchange.traffic
    return Row(
        shape=shape,
        moved_bytes=traffic.count_bytes + traffic.dispatch_bytes + traffic.combine_bytes,
        least_bytes=traffic.rows * shape.least_row_bytes
        + (traffic.returned_rows - traffic.rows) * shape.hidden * 2,
        exchange_us=statistics.median(ours),
        exchange_spread_us=_spread(ours),
        bare_us=statistics.median(bare),
        bare_spread_us=_spread(bare),
    )


def _values(dispatched: Dispatched) -> torch.Tensor:
    if dispatched.scales is None:
        return dispatched.rows
    return dequantize_rows(dispatched.rows, dispatched.scales, torch.float32)


def _slowest(times: list[float], group: dist.ProcessGroup) -> list[float]:
    worst = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return worst.tolist()


def _spread(samples: list[float]) -> float:
    low, _, high = statistics.quantiles(samples, n=4)
    return high - low


def _print(rows: list[Row]) -> None:
    print(
        f"{'mode':<12}{'payload':<10}{'tokens':>7}{'KB moved':>10}{'x least':>9}"
        f"{'us':>9}{'IQR':>8}{'bare us':>9}{'IQR':>8}{'x bare':>8}"
    )
    for row in rows:
        shape = row.shape
        print(
            f"{shape.mode:<12}{shape.payload:<10}{shape.tokens:>7}{row.moved_bytes / 1e3:>10.1f}"
            f"{row.moved_bytes / row.least_bytes:>9.3f}{row.exchange_us:>9.0f}"
            f"{row.exchange_spread_us:>8.0f}{row.bare_us:>9.0f}{row.bare_spread_us:>8.0f}"
            f"{row.exchange_us / row.bare_us:>8.2f}"
        )
    print(json.dumps([asdict(row) for row in rows]))


def _run(world: World, shapes: list[Shape], num_samples: int) -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = [measure(shape, world, num_samples) for shape in shapes]
    if world.rank == 0:
        _print(rows)


def _shapes(args: argparse.Namespace) -> list[Shape]:
    return [
        Shape(mode.value, payload, tokens, args.hidden, args.experts, args.topk, args.ranks)
        for payload in PAYLOADS
        for mode, counts in ((Mode.LOW_LATENCY, args.decode), (Mode.NORMAL, args.prefill))
        for tokens in counts
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes, at least 2")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=32, help="total, a multiple of the ranks")
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 32], help="tokens per rank")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512], help="tokens per rank")
    parser.add_argument("--samples", type=int, default=50)
    args = parser.parse_args(arguments)
    if args.ranks < 2 or args.experts % args.ranks:
        parser.error("--ranks must be at least 2 and divide --experts")
    run_ranks(args.ranks, TIMEOUT_S, _run, _shapes(args), args.samples)


if __name__ == "__main__":
    main()
