"""Who is where: the order of ranks over the bundles a cluster gave, as plain data and as a table.

Rank order is decided after placement, because a cluster may put any bundle on any node. Ranks of
one node are neighbours, so that the fast links inside a node join consecutive ranks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class PlacedBundle:
    """Where one bundle of the placement group landed, as seen by the process that runs in it.

    num_cores: cores of the node that the process may use. gpu: index, or id, of its GPU on the
    node, None for a CPU rank. interface: the network interface that has ``ip``, None if there is
    none.
    """

    bundle: int
    node_id: str
    host: str
    ip: str
    pid: int
    num_cores: int
    gpu: int | str | None = None
    interface: str | None = None


@dataclass(frozen=True)
class TopologyRow:
    """One rank. num_threads: CPU threads it computes with; slots: its physical experts, a range
    of the numbering of every MoE layer."""

    rank: int
    placed: PlacedBundle
    num_threads: int
    slots: range

    @property
    def device(self) -> str:
        if self.placed.gpu is not None:
            return f"cuda:{self.placed.gpu}"
        return f"cpu ({self.num_threads} thread{'s' if self.num_threads > 1 else ''})"


def order_ranks(
    placed: Sequence[PlacedBundle], *, first_node_id: str, num_slots_per_rank: int
) -> tuple[TopologyRow, ...]:
    """Ranks 0..R-1 over the placed bundles: the node ``first_node_id`` first (the front end's own,
    so that rank 0 serves the rendezvous next to it), then nodes by address, then by bundle."""
    ranks_on_node = Counter(bundle.node_id for bundle in placed)
    ordered = sorted(
        placed,
        key=lambda b: (b.node_id != first_node_id, ip_address(b.ip), b.node_id, b.bundle),
    )
    return tuple(
        TopologyRow(
            rank=rank,
            placed=bundle,
            num_threads=max(1, bundle.num_cores // ranks_on_node[bundle.node_id]),
            slots=range(rank * num_slots_per_rank, (rank + 1) * num_slots_per_rank),
        )
        for rank, bundle in enumerate(ordered)
    )


def topology_table(rows: Sequence[TopologyRow]) -> "Table":
    """The table printed before loading: one line per rank."""
    from rich.table import Table

    table = Table(title=f"{len(rows)} rank{'s' if len(rows) > 1 else ''}", title_justify="left")
    for heading in ("rank", "node", "address", "pid", "device", "expert slots"):
        table.add_column(heading)
    for row in rows:
        slots = f"{row.slots.start}-{row.slots.stop - 1}"
        cells = (row.rank, row.placed.host, row.placed.ip, row.placed.pid, row.device, slots)
        table.add_row(*map(str, cells))
    return table
