"""Which rank would sit where: nodes filled one after the other, as the launch orders ranks."""

from typing import TYPE_CHECKING

from launch.plan.layer import Deployment
from launch.topology import PlacedBundle, TopologyRow

if TYPE_CHECKING:
    from rich.table import Table

AT_LAUNCH = "at launch"


def planned_rows(d: Deployment) -> tuple[TopologyRow, ...]:
    """The rows of the launch's own table; addresses and processes are known at launch."""
    return tuple(
        TopologyRow(
            rank=rank,
            placed=_bundle(rank, d.card.gpus_per_node),
            num_threads=1,
            slots=range(rank * d.num_slots, (rank + 1) * d.num_slots),
        )
        for rank in range(d.ep_size)
    )


def _bundle(rank: int, gpus_per_node: int) -> PlacedBundle:
    node, gpu = divmod(rank, gpus_per_node)
    name = f"node {node}"
    return PlacedBundle(
        bundle=rank, node_id=name, host=name, ip=AT_LAUNCH, pid=0, num_cores=1, gpu=gpu
    )


def node_table(d: Deployment) -> "Table":
    """One line per node: its ranks, their GPUs and expert slots, and who they reach how."""
    from rich.table import Table

    per_node = d.card.gpus_per_node
    table = Table(title="Topology", title_justify="left")
    for heading in ("node", "ranks", "GPUs", "expert slots", "NVLink to", "fabric to"):
        table.add_column(heading)
    near = d.exchange.num_near
    rows = planned_rows(d)
    for first in range(0, d.ep_size, per_node):
        mine = rows[first : first + per_node]
        start = first // near * near
        table.add_row(
            mine[0].placed.host,
            _span(mine[0].rank, mine[-1].rank),
            _span(0, len(mine) - 1),
            _span(mine[0].slots.start, mine[-1].slots.stop - 1),
            f"ranks {_span(start, min(start + near, d.ep_size) - 1)}",
            "nobody" if near == d.ep_size else f"{d.ep_size - near} ranks ({d.fabric.name})",
        )
    return table


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
