"""Experts on the move behind the HTTP service: the same text, and everything it tells of it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from eplb.files import ModelLayers, read_loads
from launch.client import EngineClient
from launch.demo.evaluate import SHIPPED_MODEL
from launch.launch_config import ServerConfig
from moe_ep.config import EngineConfig, ModelConfig
from tests.launch.fake_client import FakeClient
from tests.launch.service_thread import ServiceThread

CONFIG = EngineConfig(
    model=str(SHIPPED_MODEL),
    served_model_name="demo",
    ep_size=2,
    dtype="float32",
    num_kv_blocks=64,
    enable_eplb=True,
    eplb_rebalance_num_iterations=8,
    expert_distribution_recorder_mode="stat",
)
PROMPTS = ["From fairest creatures we desire increase,\n", "def main(argv: list[str]) -> int:\n"]
NUM_NEW = 40


@pytest.fixture(scope="module")
def service(ray_cluster: None, tmp_path_factory) -> Iterator[ServiceThread]:
    directory = str(tmp_path_factory.mktemp("records"))
    settings = ServerConfig(expert_distribution_recorder_dir=directory)
    with ServiceThread(EngineClient(CONFIG), settings) as service:
        yield service


def complete(service: ServiceThread) -> list[str]:
    request = {"model": "demo", "prompt": PROMPTS, "temperature": 0, "max_tokens": NUM_NEW,
               "ignore_eos": True}  # fmt: skip
    answer = httpx.post(f"{service.url}/v1/completions", json=request, timeout=60).json()
    return [choice["text"] for choice in answer["choices"]]


def post(service: ServiceThread, verb: str) -> dict[str, Any]:
    url = f"{service.url}/{verb}_expert_distribution_record"
    return httpx.post(url, timeout=30).raise_for_status().json()


def test_text_stays_while_experts_move_and_the_service_tells(service: ServiceThread):
    texts = [complete(service) for _ in range(3)]
    assert texts[0] == texts[1] == texts[2]
    health = httpx.get(f"{service.url}/health").json()
    assert health["status"] == "ok"
    assert health["eplb"]["num_rebalances"] >= 1
    assert health["eplb"]["alarm"] == {}
    metrics = httpx.get(f"{service.url}/metrics").text
    found = dict(re.findall(r"^(moe_ep_eplb_\S+) (\S+)$", metrics, re.MULTILINE))
    assert float(found["moe_ep_eplb_rebalances"]) >= 1
    assert found['moe_ep_eplb_alarm{rank="1"}'] == "0.0"
    assert 0 < float(found['moe_ep_eplb_balancedness_ratio{layer="0",when="now"}']) <= 1
    assert float(found['moe_ep_eplb_longest_stall_seconds{rank="0"}']) > 0


def test_a_dump_has_every_token_of_every_step(service: ServiceThread):
    post(service, "start")
    complete(service)
    post(service, "stop")
    dump = post(service, "dump")
    (path,) = dump["files"]
    assert Path(path).name.startswith("expert_distribution_recorder_")
    model = ModelConfig.from_path(SHIPPED_MODEL)
    layers = ModelLayers(model.num_moe_layers, model.first_k_dense_replace, model.num_experts)
    loads = read_loads(path, layers)
    assert loads.shape == (dump["num_steps"], model.num_moe_layers, model.num_experts)
    # All tokens but the last of each text go through the layers, each to its choices; those of a
    # prompt through the last layer only when they are sampled from.
    num_tokens = sum(len(prompt.encode()) + NUM_NEW - 1 for prompt in PROMPTS)
    expected = torch.full((model.num_moe_layers,), num_tokens * model.num_experts_per_tok)
    expected[-1] = len(PROMPTS) * NUM_NEW * model.num_experts_per_tok
    assert torch.equal(loads.sum((0, 2)), expected.double())


def test_without_the_mode_nothing_can_be_recorded():
    with ServiceThread(FakeClient()) as service:
        answer = httpx.post(f"{service.url}/start_expert_distribution_record")
        assert answer.status_code == 400
        assert "--expert-distribution-recorder-mode" in answer.json()["error"]["message"]
        assert httpx.get(f"{service.url}/health").json() == {"status": "ok"}
