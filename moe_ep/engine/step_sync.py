"""How ranks exchange their votes before a step, and how they sleep when nobody has work.

Knows nothing of what is voted on. Idle ranks must neither burn a core nor sit in a collective,
whose time limit would end them; so they block on one key of the rendezvous store, which the first
rank that gets work sets.

Wave w is the number of sleeps before this one. Every sleep follows an exchange in which all ranks
were idle, so all ranks count the same waves, and key ``wake/w`` wakes exactly those of wave w. The
key may be set before a slower rank starts to wait for it: that rank then does not sleep at all.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

# How often a sleeper asks the store for an answer. A broken connection ends the sleep at once, and
# torch logs two warnings each time, so this is rare.
HEARTBEAT_S = 600.0


class StepSync(ABC):
    """One rank's end of the agreement between steps."""

    @abstractmethod
    def agree(self, vector: Sequence[int]) -> list[list[int]]:
        """All ranks' vectors in rank order. Collective; same length on every rank.

        Raises RuntimeError that names this rank when a peer died or the time limit passed.
        """

    @abstractmethod
    def sleep(self, has_work: Callable[[], bool]) -> None:
        """Block until this or another rank gets work. Call on all ranks once all agreed to be idle.

        has_work: whether work came in since the agreement. It is asked once, after this rank
        counts as asleep; whoever brings work must make it visible first and call ``wake`` second.
        Raises RuntimeError when the other ranks cannot be reached any more.
        """

    @abstractmethod
    def wake(self) -> None:
        """End the sleep of all ranks, if this rank sleeps. For any thread, at any time."""


class LocalSync(StepSync):
    """One rank, nobody to agree with."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def agree(self, vector: Sequence[int]) -> list[list[int]]:
        return [list(vector)]

    def sleep(self, has_work: Callable[[], bool]) -> None:
        self._woken.clear()
        if not has_work():
            self._woken.wait()

    def wake(self) -> None:
        self._woken.set()


class GroupSync(StepSync):
    """Several ranks: one all-gather over the group, sleep on the store.

    group: a group of CPU tensors (gloo) over all ranks. store: the rendezvous store, of which two
    clients are made, since one that waits blocks its other calls. timeout_s: limit of an exchange.
    """

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        timeout_s: float,
    ) -> None:
        self._group = group
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout = timedelta(seconds=timeout_s)
        self._waiter = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._setter = store.clone()  # type: ignore[attr-defined]
        self._lock = threading.Lock()  # guards _setter and _is_asleep
        self._is_asleep = False
        self._wave = 0

    def agree(self, vector: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(vector, dtype=torch.int64)
        votes = [torch.empty_like(own) for _ in range(self._num_ranks)]
        try:
            work = dist.all_gather(votes, own, group=self._group, async_op=True)
            assert work is not None, f"rank {self._rank} is not in the group"
            work.wait(self._timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._rank} got no agreement of all {self._num_ranks} ranks within"
                f" {self._timeout.total_seconds():g} s: {error}"
            ) from error
        return [vote.tolist() for vote in votes]

    def sleep(self, has_work: Callable[[], bool]) -> None:
        if self._rank == 0 and self._wave > 0:
            # All ranks agreed since that wave, so none sleeps in it and none can set its key.
            self._setter.delete_key(_key(self._wave - 1))
        with self._lock:
            self._is_asleep = True
        try:
            if has_work():
                self.wake()
            self._wait()
        finally:
            with self._lock:
                self._is_asleep = False
                self._wave += 1

    def wake(self) -> None:
        with self._lock:
            if self._is_asleep:
                self._setter.set(_key(self._wave), "1")

    def _wait(self) -> None:
        while True:
            try:
                return self._waiter.wait([_key(self._wave)], timedelta(seconds=HEARTBEAT_S))
            except dist.DistStoreError:
                continue  # the heartbeat passed and the store answered that the key is not there
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {self._rank} lost the rendezvous store while asleep: {error}"
                ) from error


def _key(wave: int) -> str:
    return f"wake/{wave}"
