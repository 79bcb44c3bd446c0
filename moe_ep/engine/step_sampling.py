"""Records every so many steps of a rank's loop while it serves."""

from collections import deque

from moe_ep.engine.clocks import clock_offset_ns
from moe_ep.engine.world import World
from moe_ep.progress import Progress
from moe_ep.recorder import Recorder, StepRecord, create_clock

_MOST_KEPT = 16  # records that nobody has taken; the oldest goes


class StepSampling:
    """interval: every so manieth step is recorded; 0 for none.

    All ranks count the same steps, so all of them record the same ones without asking. Clocks
    drift, so each record is put on rank 0's clock with an offset measured right after its step.
    """

    def __init__(self, interval: int, progress: Progress, world: World) -> None:
        self._interval = interval
        self._progress = progress
        self._world = world
        self._recorder = Recorder(progress, create_clock(world.device))
        self._records: deque[StepRecord] = deque(maxlen=_MOST_KEPT)

    @property
    def _is_due(self) -> bool:
        return self._interval > 0 and (self._progress.step + 1) % self._interval == 0

    def begin(self) -> None:
        """Before anything of the step; again if it is begun anew."""
        if self._is_due:
            self._recorder.start()

    def end(self) -> None:
        """After everything of a step that has run, before it is counted. Collective when due."""
        if self._is_due:
            record = self._recorder.finish()
            self._records.append(record.shifted(clock_offset_ns(self._world.group)))

    def take(self) -> list[StepRecord]:
        """Records since the last call. For any one thread."""
        taken = []
        while self._records:
            taken.append(self._records.popleft())
        return taken
