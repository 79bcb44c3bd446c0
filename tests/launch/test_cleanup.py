"""However a program ends, nothing it started stays: no process, and so no port and no memory.

The programs run at the same time, each with a Ray of its own. What belongs to one is found by its
family tree while it lives, and by a mark in the environment, which not every process keeps.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint

MARK = "MOE_EP_TEST_PROGRAM"
START_TIMEOUT_S = 240.0
END_TIMEOUT_S = 60.0

# What every program does first; they differ in what follows.
COMMON = """
import signal, sys, threading
from launch.failure import EngineDeadError
from moe_ep import LLM, SamplingParams

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job has not
llm = LLM(sys.argv[1], ep_size=int(sys.argv[2]), num_kv_blocks=64)
params = SamplingParams(max_tokens=400, ignore_eos=True)
def work():
    while True:
        llm.generate([[2, 3, 4], [5]], params)
"""
FOREVER = """
threading.Timer(1.0, print, ["working"], {"flush": True}).start()
work()
"""
PROGRAMS = {
    "killed": (2, FOREVER),
    "terminated": (1, FOREVER),
    "interrupted": (1, FOREVER),
    "closed": (
        1,
        """
print("working", flush=True)
sys.stdin.readline()
llm.shutdown()
llm.shutdown()
try:
    llm.generate([[2]], params)
except EngineDeadError as error:
    assert "shut down" in str(error)
else:
    raise SystemExit("it still works")
print("closed", flush=True)
sys.stdin.readline()
""",
    ),
}
JOINED = """
import asyncio, sys
from launch.client import EngineClient
from moe_ep.config import EngineConfig
from moe_ep.engine.request import SamplingParams

async def main():
    config = EngineConfig(model=sys.argv[1], ep_size=2, num_kv_blocks=64)
    client = await EngineClient.start(config, ray_address=sys.argv[2])
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    for number in range(10**6):
        async for output in client.generate([2, 3, 4], params, str(number)):
            if number == 0:
                print(*(row.placed.pid for row in client.rows), flush=True)
asyncio.run(main())
"""


class Program:
    def __init__(self, name: str) -> None:
        num_ranks, code = PROGRAMS[name]
        self.mark = f"{MARK}={name}-{os.getpid()}"
        environment = dict(os.environ) | dict([self.mark.split("=")])
        environment.pop("RAY_ADDRESS", None)
        model = str(tiny_checkpoint("v3").path)
        self._known: set[tuple[int, str]] = set()
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMON + code, model, str(num_ranks)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def say(self, line: str, answer: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        self._wait_for(answer)

    def wait_until_working(self) -> None:
        self._wait_for("working")

    def _wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == word + "\n":
                return
        raise AssertionError(f"no {word!r} came:\n{self.process.communicate()[1][-4000:]}")

    def temp_dir(self) -> Path:
        """Ray's directory, named on the command lines of its processes."""
        lines = [_read(pid, "cmdline").split("\0") for pid in self.family()]
        words = {word.split("=")[-1] for line in lines for word in line}
        (found,) = {Path(*Path(w).parts[:3]) for w in words if w.startswith("/tmp/moe-ep-ray-")}
        return found

    def family(self) -> set[int]:
        """The program and everything it has started so far; kept in mind for ``left``."""
        parents = {pid: int(stat[1]) for pid in _pids() if (stat := _stat(pid))}
        members = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in members} - members:
            members |= more
        self._known |= {(pid, stat[19]) for pid in members if (stat := _stat(pid))}
        return members

    def left(self) -> dict[int, str]:
        """Command lines of what still lives."""
        known = {pid for pid, start in self._known if _stat(pid)[19:20] == [start]}
        marked = {pid for pid in _pids() if self.mark in _read(pid, "environ").split("\0")}
        alive = {pid for pid in known | marked if _stat(pid)[:1] not in ([], ["Z"])}
        return {pid: _read(pid, "cmdline").replace("\0", " ").strip() for pid in alive}

    def assert_gone(self, but: Collection[int] = ()) -> None:
        deadline = time.monotonic() + END_TIMEOUT_S
        while (left := self.left()).keys() - but and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left.keys() == set(but), left

    def kill_all(self) -> None:
        self.process.kill()
        self.process.communicate()
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(directory.name) for directory in Path("/proc").glob("[0-9]*")]


def _read(pid: int, name: str) -> str:
    """A file of the process; empty when it is gone or somebody else's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """Fields of the process behind its name: 0 state, 1 parent, 19 start time; [] when gone."""
    return _read(pid, "stat").rpartition(")")[2].split()


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, Program]]:
    """All programs, started together because most of the time is waiting for Ray."""
    started: dict[str, Program] = {}
    try:
        for name in PROGRAMS:
            started[name] = Program(name)
        yield started
    finally:
        for program in started.values():
            program.kill_all()


@pytest.mark.timeout(START_TIMEOUT_S + END_TIMEOUT_S)
def test_a_killed_program_takes_its_ranks_from_a_cluster_that_stays(
    programs: dict[str, Program], ray_cluster: None
):
    """The first test: meanwhile the other programs start."""
    import ray

    address = ray.get_runtime_context().gcs_address
    model = str(tiny_checkpoint("v3").path)
    command = [sys.executable, "-c", JOINED, model, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pids = [int(word) for word in program.stdout.readline().split()]
        program.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert sum(node["Alive"] for node in ray.nodes()) == 1


@pytest.mark.timeout(START_TIMEOUT_S + END_TIMEOUT_S)
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("killed", signal.SIGKILL),
        ("terminated", signal.SIGTERM),
        ("interrupted", signal.SIGINT),
    ],
)
def test_a_signal_leaves_nothing(programs: dict[str, Program], name: str, number: signal.Signals):
    program = programs[name]
    program.wait_until_working()
    temp_dir = program.temp_dir()
    assert len(program.left()) > 3
    program.process.send_signal(number)
    program.assert_gone()
    assert not temp_dir.exists()
    assert program.process.wait() != 0


@pytest.mark.timeout(START_TIMEOUT_S + END_TIMEOUT_S)
def test_shutdown_leaves_only_the_program(programs: dict[str, Program]):
    program = programs["closed"]
    program.wait_until_working()
    assert len(program.family()) > 3
    program.say("close", answer="closed")
    program.assert_gone(but={program.process.pid})
    assert program.process.communicate("end\n")[1].count("Error") == 0
    assert program.process.returncode == 0
