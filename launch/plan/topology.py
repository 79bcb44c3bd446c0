"""Which rank would sit where, and what must be able to reach what: nodes filled one after the
other, as the launch orders ranks. EP groups begin at a node."""

from typing import TYPE_CHECKING, Any

from launch.launch_config import ServerConfig
from launch.plan.layer import Deployment
from launch.topology import PlacedBundle, TopologyRow

if TYPE_CHECKING:
    from rich.table import Table

AT_LAUNCH = "at launch"
RAY_PORT = 6379  # where ``ray start --head`` listens unless told otherwise
SHOWN_NODES = 4


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


def topology_json(d: Deployment) -> dict[str, Any]:
    """``topology`` of ``data/plan.schema.json``."""
    return {
        "topology": [
            {
                "rank": row.rank,
                "node": row.placed.host,
                "gpu": row.placed.gpu,
                "first_slot": row.slots.start,
                "last_slot": row.slots.stop - 1,
            }
            for row in planned_rows(d)
        ]
    }


def _bundle(rank: int, gpus_per_node: int) -> PlacedBundle:
    node, gpu = divmod(rank, gpus_per_node)
    name = f"node {node}"
    return PlacedBundle(
        bundle=rank, node_id=name, host=name, ip=AT_LAUNCH, pid=0, num_cores=1, gpu=gpu
    )


def node_table(d: Deployment) -> "Table":
    """One line per node: its ranks, their GPUs and expert slots, and who they reach how. Of many
    nodes the first, the second and the last, as all are alike."""
    from rich.table import Table

    num_nodes = -(-d.ep_size // d.card.gpus_per_node)
    plural = "" if num_nodes == 1 else "s"
    table = Table(title=f"Topology: {num_nodes} node{plural}", title_justify="left")
    for heading in ("node", "ranks", "GPUs", "expert slots", "NVLink to", "fabric to"):
        table.add_column(heading)
    shown = range(num_nodes) if num_nodes <= SHOWN_NODES else (0, 1, num_nodes - 1)
    for node in shown:
        if node - 1 not in (-1, *shown):
            table.add_row("…")
        table.add_row(*_node(d, node))
    return table


def _node(d: Deployment, node: int) -> tuple[str, ...]:
    first = node * d.card.gpus_per_node
    last = min(first + d.card.gpus_per_node, d.ep_size) - 1
    near = d.exchange.num_near
    start = first // near * near
    return (
        f"node {node}",
        _span(first, last),
        _span(0, last - first),
        _span(first * d.num_slots, (last + 1) * d.num_slots - 1),
        f"ranks {_span(start, min(start + near, d.ep_size) - 1)}",
        "nobody" if near == d.ep_size else f"{d.ep_size - near} ranks ({d.fabric.name})",
    )


def port_lines(d: Deployment) -> list[str]:
    """What a firewall must let through."""
    lines = [f"Clients reach node 0 on {ServerConfig.port} (HTTP, --port)."]
    if d.ep_size > d.card.gpus_per_node:
        lines.append(
            f"Nodes reach node 0 on {RAY_PORT} (ray start --head) and each other on any port: Ray's"
            " workers, the ranks' store, Gloo, NCCL and NVSHMEM take free ones."
        )
    return lines


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
