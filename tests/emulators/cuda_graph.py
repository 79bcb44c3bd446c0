"""A stand-in for CUDA graph capture on CPU tensors, stricter than the real one.

A capture records every operation with the very tensors that it was given and returned; a replay
executes them again on those, in the same order. So whatever Python decided while capturing stays
as it was, and a value that came from the host is the old one: a replay with other inputs that gives
what running the function anew gives shows that there is none.

Refused while capturing: values that leave the device (``item``, ``tolist``), shapes that depend on
values (``nonzero``, boolean masks), and tensors that the host made meanwhile (``torch.tensor``,
``from_numpy``). As on a device, nothing that was captured has run until the first replay: its
results are NaN until then. Memory that a replayed function allocates holds NaN until it writes it,
and a replay wipes the results of all other graphs of its maker, as they share their memory.

Libraries' stand-ins call ``launch`` for what would be a kernel: it runs at once, unseen by the
recorder, and again at each replay, with the exchanges that it makes. What they do outside of it is
done by the host, so only when they are called. Triton's interpreter does so with every kernel.
"""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.emulators.unwritten import poison

P = ParamSpec("P")
R = TypeVar("R")

TO_HOST = ("tolist", "numpy", "cpu", "__array__", "item")
FROM_HOST = ("tensor", "as_tensor", "from_numpy", "frombuffer", "scalar_tensor")


class CaptureError(RuntimeError):
    """On a device: the capture fails, or the graph replays something else than was meant."""


class EmulatedGraph:
    """The operations of one capture, and the tensors that it came back with."""

    def __init__(self, maker: "EmulatedGraphMaker") -> None:
        self._maker = maker
        self._operations: list[Callable[[], None]] = []
        self._results: list[torch.Tensor] = []
        self.num_replays = 0
        self.open: dict[int, str] = {}  # see ``fork``

    def replay(self) -> None:
        for graph in self._maker.graphs:
            graph.wipe()
        self.num_replays += 1
        for operation in self._operations:
            operation()

    def add(self, operation: Callable[[], None]) -> None:
        self._operations.append(operation)

    def end(self, results: Any) -> None:
        if self.open:
            raise CaptureError(f"not joined before the capture ends: {list(self.open.values())}")
        self._results = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        self.wipe()

    def wipe(self) -> None:
        for tensor in self._results:
            poison(tensor)


_current: EmulatedGraph | None = None


def capturing() -> EmulatedGraph | None:
    """The graph that this process captures into right now."""
    return _current


def launch(kernel: Callable[[], None]) -> None:
    """Run a kernel, and again at each replay of the graph that is being captured, if there is one.

    It may read values: it stands for code that runs on the device.
    """
    if _current is not None:
        _current.add(kernel)
    with _unseen():
        kernel()


def fork(work: object, name: str) -> None:
    """What begins while capturing must end in the same capture: an event, a hook."""
    if _current is not None:
        _current.open[id(work)] = name


def join(work: object) -> None:
    if _current is not None:
        del _current.open[id(work)]


def kernel(function: Callable[P, None]) -> Callable[P, None]:
    """A function that writes its results into tensors it is given, as one kernel."""

    @functools.wraps(function)
    def launched(*args: P.args, **kwargs: P.kwargs) -> None:
        launch(lambda: function(*args, **kwargs))

    return launched


def refuse_capture(what: str) -> None:
    """Called by a library's stand-in before it does what no capture allows."""
    if _current is not None:
        raise CaptureError(f"{what}, which cannot be captured")


class EmulatedGraphMaker:
    """A ``moe_ep.engine.graphs.GraphMaker``."""

    def __init__(self) -> None:
        self.graphs: list[EmulatedGraph] = []

    def capture(self, function: Callable[[], R]) -> tuple[EmulatedGraph, R]:
        global _current
        assert _current is None, "one capture at a time"
        graph = _current = EmulatedGraph(self)
        try:
            with _triton_kernels(), _HostValues(), _Recorder(graph):
                results = function()
        finally:
            _current = None
        graph.end(results)
        self.graphs.append(graph)
        return graph, results


class _HostValues(TorchFunctionMode):
    """Refuses what goes from or to the host without an operation that the recorder would see."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in TO_HOST:
            raise CaptureError(f"{name}: the host waits for a value of the device")
        if name in FROM_HOST:
            raise CaptureError(f"{name}: a tensor made by the host, whose values stay as they are")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: EmulatedGraph) -> None:
        super().__init__()
        self._graph = graph
        tensors = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
        self._known = {_address(item) for item in tensors}
        # Kept, or an address could be taken by a tensor that comes from nowhere.
        self._made: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # what it is made of, in inference mode too
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        _refuse(func, args)
        for tensor in given:
            address = _address(tensor)
            if address is not None and address not in self._known:
                raise CaptureError(f"{func}: {_shape(tensor)} was made by the host meanwhile")
        kept_args, kept_kwargs = tree_map_only(torch.Tensor, _alias, (args, kwargs))
        result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        if any(not isinstance(leaf, torch.Tensor) for leaf in leaves if leaf is not None):
            raise CaptureError(f"{func}: the host waits for a value of the device")
        addresses = {_address(tensor) for tensor in given}
        fresh = [leaf for leaf in leaves if _is_fresh(leaf, addresses)]
        self._made += fresh
        self._known |= {_address(leaf) for leaf in fresh}
        writes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        if fresh or writes:
            is_fresh = [_is_fresh(leaf, addresses) for leaf in leaves]
            self._record(lambda: func(*kept_args, **kept_kwargs), _name(func), leaves, is_fresh)
        return result

    def _record(
        self, again: Callable[[], Any], name: str, leaves: list[Any], is_fresh: list[bool]
    ) -> None:
        targets = [
            _alias(leaf) if fresh else None for leaf, fresh in zip(leaves, is_fresh, strict=True)
        ]

        def allocate() -> None:
            for target in targets:
                if target is not None:
                    poison(target)

        def operate() -> None:
            for target, now in zip(targets, tree_leaves(again()), strict=True):
                if target is not None:
                    target.copy_(now)

        if name.startswith(("empty", "new_empty")):
            launch(allocate)
        else:
            self._graph.add(operate)


def _name(func: Any) -> str:
    return func._schema.name.split("::")[1]


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in the present shape, which an operation in place may change later."""
    if _address(tensor) is None:
        return tensor
    with _unseen():
        return tensor.detach()


def _refuse(func: Any, args: tuple) -> None:
    if torch.Tag.data_dependent_output in func.tags:
        raise CaptureError(f"{func}: the host waits for a value of the device")
    name = _name(func)
    if name == "lift_fresh":
        raise CaptureError("a tensor made by the host, whose values stay as they are")
    if name in ("index", "index_put", "index_put_"):
        masks = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in masks):
            raise CaptureError(f"{func}: with a boolean mask the host waits for its count")
    elif torch.Tag.dynamic_output_shape in func.tags or name == "bincount":
        raise CaptureError(f"{func}: the host waits for the size of the result")


def _address(tensor: torch.Tensor) -> int | None:
    """Of the storage; None for what has none (oneDNN's own weights, empty tensors)."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


def _is_fresh(leaf: Any, given: set[int | None]) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.numel() > 0 and _address(leaf) not in given


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


@contextmanager
def _unseen() -> Iterator[None]:
    """Nothing in here is recorded or refused."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def _triton_kernels() -> Iterator[None]:
    """Kernels in Triton's interpreter read the tensors' memory themselves."""
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        launch(lambda: run(self, *args, **kwargs))

    interpreter.GridExecutor.__call__ = launched
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = run
