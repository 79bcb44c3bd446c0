"""A small process beside a local Ray that ends what Ray leaves behind.

When a program is killed, most of Ray's processes die with it, but its agents may wait a minute for
the others that are gone already, and the session's files stay. This process outlives the program
by a moment: it ends every process that writes to the session's directory, as all of Ray's do to
their logs there, and removes the directory. Neither a mark in the environment nor the family tree
would do: Ray's processes write their titles over the one, and lose the other when the first dies.

Run by its path: it needs only the standard library, and starts in no time.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_GRACE_S = 1.0  # for processes that are ending by themselves
_POLL_S = 0.5
_FINISH_TIMEOUT_S = 10.0


class Reaper:
    """The program's handle on the reaper of the session in ``directory``."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        # A session of its own, so that a Ctrl-C at the terminal does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, directory, str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def finish(self) -> None:
        """End the session's processes now and remove its directory."""
        # Said in words: a child that the program forked keeps the pipe open.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(b"finish\n", timeout=_FINISH_TIMEOUT_S)
        self._process.kill()
        self._process.wait()


def main(directory: str, program_pid: int) -> None:
    """Wait for the program's word or its end, then clean up."""
    while os.getppid() == program_pid:
        if select.select([sys.stdin], [], [], _POLL_S)[0]:
            break
    deadline = time.monotonic() + _GRACE_S
    while _writers(directory, program_pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in _writers(directory, program_pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


def _writers(directory: str, program_pid: int) -> set[int]:
    """Processes that have a file below ``directory`` open for writing.

    The program's own log files, whose names end in its process id, do not count: other children
    that it forked have them open too. Processes of other users are not seen.
    """
    own = f"_{program_pid}"
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            target = Path(os.readlink(descriptor))
            is_theirs = target.is_relative_to(directory) and not target.stem.endswith(own)
            if is_theirs and _is_writable(descriptor):
                found.add(int(descriptor.parts[2]))
    return found


def _is_writable(descriptor: Path) -> bool:
    info = descriptor.parent.with_name("fdinfo") / descriptor.name
    flags = next(line for line in info.read_text().splitlines() if line.startswith("flags:"))
    return bool(int(flags.split()[1], 8) & (os.O_WRONLY | os.O_RDWR))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
