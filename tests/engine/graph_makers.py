"""How the engine is made to capture decode steps on a CPU, and what a replay must equal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from torch.utils._pytree import tree_leaves

from moe_ep.engine import graphs

R = TypeVar("R")
M = TypeVar("M")


class AnewMaker:
    """What a graph must be equal to: a replay runs the function anew, on the same inputs."""

    def capture(self, function: Callable[[], R]) -> tuple["AnewMaker._Graph", R]:
        results = function()
        return AnewMaker._Graph(function, results), results

    class _Graph:
        def __init__(self, function: Callable[[], Any], results: Any) -> None:
            self._function, self._results = function, results

        def replay(self) -> None:
            pairs = zip(tree_leaves(self._results), tree_leaves(self._function()), strict=True)
            for before, now in pairs:
                before.copy_(now)


@contextmanager
def emulated_graphs(maker: M) -> Iterator[M]:
    """The engine captures its decode steps here, in graphs of the maker."""
    with patch.object(graphs, "graph_maker", lambda device: maker):
        yield maker
