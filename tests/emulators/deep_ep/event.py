"""Events: results of an asynchronous call exist only after its event has been waited for."""

from collections.abc import Callable
from typing import Any

import torch

from tests.emulators.cuda_graph import capturing, fork, join
from tests.emulators.cuda_graph import launch as launch_kernel
from tests.emulators.deep_ep.checks import host_assert


class EventHandle:
    """The compiled event of the library. Here the wait is what makes the results appear."""

    def __init__(self) -> None:
        self._publish: Callable[[], None] | None = None
        self._graph = capturing()

    def current_stream_wait(self) -> None:
        host_assert(self._graph is capturing(), "cudaErrorStreamCaptureIsolation")
        if self._publish is not None:
            publish, self._publish = self._publish, None
            join(self)
            launch_kernel(publish)


class EventOverlap:
    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._release_handle_by_call = False
        self.hook_after_wait: Callable[[], None] | None = None

    def current_stream_wait(self, release_handle: bool = False) -> None:
        assert self.event is not None
        self.event.current_stream_wait()
        if self.hook_after_wait is not None:
            hook, self.hook_after_wait = self.hook_after_wait, None
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        assert self.hook_after_wait is None, "A hook is already registered"
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> "EventOverlap":
        self._release_handle_by_call = release_handle
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if self.event is not None:
            self.current_stream_wait(release_handle=self._release_handle_by_call)
        self._release_handle_by_call = False


def launch(publish: Callable[[], None], *, is_async: bool) -> EventHandle | None:
    """Let the results of a call appear: now, or when the returned event is waited for."""
    if not is_async:
        launch_kernel(publish)
        return None
    event = EventHandle()
    event._publish = publish
    fork(event, "an event of deep_ep")
    return event


def check_v1_event(
    previous_event: object, *, async_finish: bool, allocate_on_comm_stream: bool
) -> None:
    if previous_event is not None and not isinstance(previous_event, EventOverlap):
        # The library would take ``.event`` of it, find none, and not wait.
        raise TypeError(f"V1 takes an EventOverlap, got {type(previous_event).__name__}")
    if allocate_on_comm_stream and not (previous_event is not None and async_finish):
        raise RuntimeError("Assertion exception: previous_event.has_value() and async")


def check_v2_event(previous_event: object, *, allocate_on_comm_stream: bool) -> None:
    if previous_event is not None and not isinstance(previous_event, EventHandle):
        raise TypeError(f"V2 takes an EventHandle, got {type(previous_event).__name__}")
    if previous_event is not None and not allocate_on_comm_stream:
        raise RuntimeError("Assertion exception: previous_event needs allocate_on_comm_stream")
