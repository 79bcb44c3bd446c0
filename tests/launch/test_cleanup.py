"""However a program ends, nothing it started stays: no process, and so no port and no memory.

The programs run at the same time, each with a Ray of its own, and are told apart by a mark in their
environment that everything they start inherits.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint

MARK = "MOE_EP_TEST_PROGRAM"
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0

# What every program does first; they differ in what follows.
COMMON = """
import sys, threading
from launch.failure import EngineDeadError
from moe_ep import LLM, SamplingParams

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
    "terminated": (2, FOREVER),
    "interrupted": (1, FOREVER),
    # Neither shutdown nor with: the end of the program is enough, even with requests open.
    "ended": (
        1,
        'threading.Thread(target=work, daemon=True).start(); print("working", flush=True)',
    ),
    "closed": (
        1,
        """
llm.shutdown()
llm.shutdown()
try:
    llm.generate([[2]], params)
except EngineDeadError as error:
    assert "shut down" in str(error)
else:
    raise SystemExit("it still works")
print("working", flush=True)
sys.stdin.read()
""",
    ),
}


class Program:
    def __init__(self, name: str) -> None:
        num_ranks, code = PROGRAMS[name]
        self.mark = f"{MARK}={name}-{os.getpid()}"
        environment = dict(os.environ) | dict([self.mark.split("=")])
        environment.pop("RAY_ADDRESS", None)
        model = str(tiny_checkpoint("v3").path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMON + code, model, str(num_ranks)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_working(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == "working\n":
                return
        raise AssertionError(f"the program did not start:\n{self.process.communicate()[1][-4000:]}")

    def left(self) -> dict[int, str]:
        """Live processes that carry the mark, the program itself included."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                    found[int(directory.name)] = (directory / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # ended meanwhile, or somebody else's
        return found

    def temp_dirs(self) -> set[str]:
        """Ray's directories named on the command lines of what is left."""
        lines = " ".join(self.left().values()).replace("\0", " ").replace("=", " ").split()
        return {"/".join(word.split("/")[:3]) for word in lines if word.startswith("/tmp/moe-ep-")}

    def assert_gone(self) -> None:
        deadline = time.monotonic() + END_TIMEOUT_S
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == {}

    def kill_all(self) -> None:
        self.process.kill()
        self.process.communicate()
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)


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
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("killed", signal.SIGKILL),
        ("terminated", signal.SIGTERM),
        ("interrupted", signal.SIGINT),
        ("ended", None),
    ],
)
def test_nothing_is_left(programs: dict[str, Program], name: str, number: signal.Signals | None):
    program = programs[name]
    program.wait_until_working()
    if number is not None:
        temp_dirs = program.temp_dirs()
        assert len(program.left()) > 3
        assert len(temp_dirs) == 1
        program.process.send_signal(number)
    program.assert_gone()
    if number is not None and number is not signal.SIGKILL:
        assert not Path(temp_dirs.pop()).exists()
    assert (program.process.wait() == 0) is (name == "ended")


@pytest.mark.timeout(START_TIMEOUT_S + END_TIMEOUT_S)
def test_shutdown_leaves_only_the_program(programs: dict[str, Program]):
    program = programs["closed"]
    program.wait_until_working()
    deadline = time.monotonic() + END_TIMEOUT_S
    while set(program.left()) != {program.process.pid} and time.monotonic() < deadline:
        time.sleep(0.2)
    assert set(program.left()) == {program.process.pid}
    assert program.process.communicate()[1].count("Error") == 0
    assert program.process.returncode == 0
