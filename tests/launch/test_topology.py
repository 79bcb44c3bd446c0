"""Rank order over placed bundles, worked by hand."""

import io

import pytest
from rich.console import Console

from launch.topology import PlacedBundle, order_ranks, topology_table


def _bundle(bundle: int, node: str, ip: str, cores: int = 8, gpu: int | None = None):
    return PlacedBundle(bundle, node, f"host-{node}", ip, 100 + bundle, cores, gpu, "eth0")


def test_own_node_first_then_by_address_then_by_bundle():
    placed = [
        _bundle(0, "c", "10.0.0.10"),
        _bundle(1, "b", "10.0.0.9"),  # as text, "10.0.0.10" would come before this
        _bundle(2, "a", "10.0.0.200"),
        _bundle(3, "c", "10.0.0.10"),
        _bundle(4, "a", "10.0.0.200"),
        _bundle(5, "b", "10.0.0.9"),
    ]
    rows = order_ranks(placed, first_node_id="a", num_slots_per_rank=5)
    assert [row.placed.bundle for row in rows] == [2, 4, 1, 5, 0, 3]
    assert [row.rank for row in rows] == list(range(6))
    assert [row.slots for row in rows][:2] == [range(5), range(5, 10)]


def test_order_does_not_depend_on_the_order_of_answers():
    placed = [_bundle(i, "ab"[i % 2], f"10.0.0.{i % 2}") for i in range(6)]
    expected = order_ranks(placed, first_node_id="b", num_slots_per_rank=1)
    assert order_ranks(placed[::-1], first_node_id="b", num_slots_per_rank=1) == expected


def test_ipv6_and_a_front_end_on_no_rank_node():
    placed = [_bundle(0, "a", "fd00::2"), _bundle(1, "b", "fd00::1")]
    rows = order_ranks(placed, first_node_id="elsewhere", num_slots_per_rank=1)
    assert [row.placed.node_id for row in rows] == ["b", "a"]


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(2, 1, 2), (2, 4, 1), (9, 4, 2), (8, 2, 4)]
)
def test_ranks_of_a_node_share_its_cores(cores: int, ranks: int, threads: int):
    placed = [_bundle(i, "a", "10.0.0.1", cores) for i in range(ranks)]
    placed.append(_bundle(ranks, "b", "10.0.0.2", 16))
    rows = order_ranks(placed, first_node_id="a", num_slots_per_rank=1)
    assert [row.num_threads for row in rows] == [threads] * ranks + [16]


def test_table_names_every_rank():
    placed = [_bundle(0, "a", "10.0.0.1", 1), _bundle(1, "b", "10.0.0.2", gpu=3)]
    rows = order_ranks(placed, first_node_id="a", num_slots_per_rank=16)
    out = io.StringIO()
    Console(file=out, width=120).print(topology_table(rows))
    first, second = (line for line in out.getvalue().splitlines() if "host-" in line)
    assert all(text in first for text in ("host-a", "10.0.0.1", "100", "cpu (1 thread)", "0-15"))
    assert all(text in second for text in ("host-b", "10.0.0.2", "101", "cuda:3", "16-31"))
