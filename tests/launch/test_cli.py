"""The command line: what it imports, its exit codes, and a service's life under signals."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from launch.benchmarks import BENCHMARKS
from launch.cli import main
from launch.demo.evaluate import SHIPPED_MODEL
from tests.emulators.install import emulated
from tests.launch.fake_client import FakeClient

HEAVY = ("torch", "ray", "transformers", "fastapi", "pydantic", "uvicorn", "numpy", "rich")
COMMANDS = ("demo", "generate", "serve", "run-batch", "check", "eplb", "bench")
MODEL = ("--model", str(SHIPPED_MODEL))


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"]])
def test_help_imports_nothing_heavy(argv: list[str]):
    code = f"""
import sys
import time
from launch.cli import main
try:
    main({argv!r})
except SystemExit as end:
    assert end.code == 0
print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.endswith("heavy: []\n")
    if argv == ["--help"]:
        assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize(
    "argv",
    [[], ["nonsense"], ["serve"], ["serve", *MODEL, "--ep-size", "x"], ["serve", "--mod", "x"]],
)
def test_wrong_usage_is_code_2(argv: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_a_wrong_configuration_is_code_2_with_every_problem(capsys: pytest.CaptureFixture[str]):
    code = main(
        ["generate", *MODEL, "--prompt", "x", "--ep-size", "5", "--dtype", "int3",
         "--max-model-len", "100000"]
    )  # fmt: skip
    assert code == 2
    text = capsys.readouterr().err
    assert "3 configuration problems" in text
    assert all(f"  - {field}: " in text for field in ("ep_size", "dtype", "max_model_len"))


def test_generate_without_a_prompt_is_code_2(capsys: pytest.CaptureFixture[str]):
    assert main(["generate", *MODEL]) == 2
    assert "--prompt" in capsys.readouterr().err


def test_bench_knows_its_names(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert main(["bench", "nonsense"]) == 2
    text = capsys.readouterr().err
    assert all(name in text for name in BENCHMARKS)
    given: list[list[str]] = []

    class Benchmark:
        @staticmethod
        def main(arguments: list[str]) -> int:
            given.append(arguments)
            return 7

    for name in BENCHMARKS:
        monkeypatch.setitem(sys.modules, f"bench.{name}", Benchmark)
        assert main(["bench", name.replace("_", "-"), "--batch", "1", "x"]) == 7
    assert given == [["--batch", "1", "x"]] * len(BENCHMARKS)


def test_check_shows_every_problem_with_its_fix(capsys: pytest.CaptureFixture[str]):
    code = main(
        ["check", *MODEL, "--ep-size", "2", "--moe-a2a-backend", "local", "--dtype", "int3"]
    )
    assert code == 1
    text = capsys.readouterr().out
    assert "2 problems" in text
    assert "moe_a2a_backend" in text
    assert "int3" in text


def test_check_answers_for_each_mode_of_the_exchange(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "240")
    model = ["--model", "deepseek-v3", "--load-format", "dummy"]
    with emulated("deep_ep"):
        assert main(["check", *model, "--ep-size", "8", "--max-num-seqs", "600"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"│ deepep +│ yes +│ no: capacity: 600 given .* in low latency +│ +│", text)
    assert re.search(r"│ deepep_v2 +│ yes +│ yes +│ yes +│", text)
    assert re.search(r"│ torch +│ yes +│ yes +│\n", text)  # experts and attention know no modes


def test_check_shows_backends_choices_and_versions(capsys: pytest.CaptureFixture[str]):
    import torch

    assert main(["check", *MODEL, "--ep-size", "2"]) == 0
    text = capsys.readouterr().out
    assert "--moe-a2a-backend for" in text
    assert re.search(r"│ local +│ no: ", text)
    assert re.search(r"│ collective +│ yes +│ yes", text)
    assert re.search(r"--dtype +│ bfloat16 +│ ", text)
    assert torch.__version__ in text
    assert "No problems" in text


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen, Path]]:
    """``moe-ep serve`` in a process of its own, which starts while other tests run; its log."""
    log = tmp_path_factory.mktemp("serving") / "log"
    argv = [sys.executable, "-m", "launch.cli", "serve", *MODEL, "--port", "0"]
    argv += ["--num-kv-blocks", "32", "--shutdown-timeout-s", "120"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield process, log
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture
def served(serving: tuple[subprocess.Popen, Path]) -> tuple[subprocess.Popen, str]:
    """The service, ready, by its URL."""
    process, log = serving
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.search(r"http://\S+", line)
    assert match, line + log.read_text()
    return process, match.group()


def test_generate_streams_all_prompts_in_order(
    capsys: pytest.CaptureFixture[str], serving: object, ray_cluster: None
):
    code = main(
        ["generate", *MODEL, "--num-kv-blocks", "32", "--temperature", "0", "--max-tokens", "5",
         "--prompt", "From fairest", "--prompt", "def main(", "--prompt-token-ids", "97", "98",
         "--ignore-eos"]
    )  # fmt: skip
    assert code == 0
    outputs = capsys.readouterr().out.split("\n\n")
    assert outputs[0].startswith("From fairest")
    assert len(outputs[0].encode()) == len("From fairest") + 5
    assert "\n\ndef main(" in "\n\n".join(outputs)


def test_generate_refuses_what_the_engine_would(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("launch.client.EngineClient", lambda *_, **__: FakeClient())
    monkeypatch.setattr("launch.lifetime._log_settings", lambda client: None)
    assert main(["generate", *MODEL, "--prompt-token-ids", "999"]) == 2
    assert "prompt[0]: 999 given" in capsys.readouterr().err


class InterruptedClient:
    """Gets a SIGTERM while it blocks in its making (as when a cluster is slow), or in ``load``."""

    interrupts_making: bool

    def __init__(self, *_: object, **__: object) -> None:
        if self.interrupts_making:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    async def load(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(30)


@pytest.mark.parametrize("interrupts_making", [True, False])
def test_sigterm_while_starting_is_code_130(
    monkeypatch: pytest.MonkeyPatch, interrupts_making: bool
):
    monkeypatch.setattr("launch.client.EngineClient", InterruptedClient)
    monkeypatch.setattr(InterruptedClient, "interrupts_making", interrupts_making, raising=False)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert main(["generate", *MODEL, "--prompt", "x"]) == 130
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_sigterm_lets_streams_end_and_leaves_no_process(served: tuple[subprocess.Popen, str]):
    process, url = served
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    body = {"prompt": "x", "max_tokens": 60, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        received = [next(lines)]
        process.send_signal(signal.SIGTERM)
        received += list(lines)
    events = [line for line in received if line.startswith("data: {")]
    assert json.loads(events[-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert received[-2:] == ["data: [DONE]", ""]
    assert process.wait(60) == 0
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
