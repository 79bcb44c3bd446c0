"""``moe-ep demo`` on a few short prompts, and its table from hand-made measurements."""

import pytest

from launch.cli import main
from launch.demo import run
from launch.demo.report import Answer, Load, report
from moe_ep.engine.engine import RankStatus
from moe_ep.progress import Progress


def _status(rank: int, *, used: int) -> RankStatus:
    return RankStatus(
        rank=rank, progress=Progress(), num_running=0, num_waiting=0, kv_tokens=0,
        kv_blocks_used=used, kv_blocks_total=100, error=None,
    )  # fmt: skip


def _answer(*, first_s: float, last_s: float, num_tokens: int) -> Answer:
    answer = Answer("verse", "prompt")
    answer.first_s, answer.last_s, answer.num_tokens = first_s, last_s, num_tokens
    answer.is_finished = True
    return answer


def test_the_table_is_right(capsys: pytest.CaptureFixture[str]):
    load = Load()
    load.add([_status(0, used=30), _status(1, used=2)])
    load.add([_status(0, used=4), _status(1, used=7)])
    load.slot_tokens = [[[3, 1], [5, 5]], [[6, 6], [2, 8]]]
    answers = [
        _answer(first_s=0.1, last_s=1.1, num_tokens=11),
        _answer(first_s=0.3, last_s=2.0, num_tokens=18),
    ]
    assert report(answers, load) == 0
    text = capsys.readouterr().out
    assert "29 tokens in 2.0 s" in text
    assert "14.5" in text  # tokens/s
    assert "200 / 280 / 298" in text  # TTFT
    assert "100 / 100 / 100" in text  # TPOT
    assert "30 of 100 blocks" in text
    assert "7 of 100 blocks" in text
    assert load.balancedness() == [8 / 12, 1.0]


def test_a_failed_request_is_told_and_fails_the_demo(capsys: pytest.CaptureFixture[str]):
    broken = Answer("code", "prompt")
    broken.take({"error": {"message": "rank 1 died"}}, now_s=1.0)
    good = _answer(first_s=0.1, last_s=1.1, num_tokens=11)
    load = Load()
    load.add([_status(0, used=0)])
    load.slot_tokens = [[[0]]]
    assert report([good, broken, Answer("verse", "cut off")], load) == 1
    text = capsys.readouterr().out
    assert "rank 1 died" in text
    assert "the stream broke off" in text


def test_the_whole_demo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ray_cluster: None
):
    prompts = run.read_prompts()
    assert {prompt["kind"] for prompt in prompts} == {"verse", "code"}
    monkeypatch.setattr(run, "MAX_TOKENS", 8)
    monkeypatch.setattr(run, "read_prompts", lambda: [*prompts[:2], *prompts[-2:]])
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    assert "4 answered, 32 tokens" in text
    assert "KV of rank 1, peak" in text
    assert "expert balancedness, MoE layer 0" in text
