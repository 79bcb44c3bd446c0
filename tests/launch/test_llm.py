"""The Python interface end to end: texts of the demo model, on two ranks."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import launch.demo
from moe_ep import LLM, SamplingParams
from moe_ep.config import ConfigError

MODEL = Path(launch.demo.__file__).parent / "model"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = ["To be, or not to be", "def main(argv):\n", "Grüße — 你好"]


@pytest.fixture(scope="module")
def llm(ray_cluster: None) -> Iterator[LLM]:
    with LLM(str(MODEL), ep_size=2, num_kv_blocks=64) as llm:
        yield llm


def test_results_come_in_the_order_of_the_prompts(llm: LLM):
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    results = llm.generate(PROMPTS, GREEDY)
    assert [result.prompt for result in results] == PROMPTS
    for result in results:
        assert result.prompt_token_ids == tokenizer.encode(result.prompt)
        (output,) = result.outputs
        assert (output.index, output.finish_reason, output.stop_reason) == (0, "length", None)
        assert len(output.token_ids) == 16
        assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)
        assert output.logprobs is None
        assert output.cumulative_logprob is None


def test_text_ids_and_dicts_are_the_same_prompt(llm: LLM):
    (by_text,) = llm.generate(PROMPTS[0], GREEDY)
    ids = by_text.prompt_token_ids
    forms: list[Any] = [ids, tuple(ids), {"prompt_token_ids": ids}, [ids], {"prompt": PROMPTS[0]}]
    for form in forms:
        (result,) = llm.generate(form, GREEDY)
        assert result.outputs == by_text.outputs
        assert result.prompt_token_ids == ids
    mixed: list[Any] = [{"prompt_token_ids": ids}, PROMPTS[0]]
    both = llm.generate(mixed, [GREEDY, GREEDY])
    assert [result.prompt for result in both] == [None, PROMPTS[0]]
    assert both[0].outputs == both[1].outputs == by_text.outputs


def test_a_stop_string_ends_the_text_before_it(llm: LLM):
    (free,) = llm.generate(PROMPTS[0], GREEDY)
    text = free.outputs[0].text
    stop = text[9:12]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, stop=(stop,))
    (stopped,) = llm.generate(PROMPTS[0], params)
    (output,) = stopped.outputs
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) < 16
    assert free.outputs[0].token_ids[: len(output.token_ids)] == output.token_ids


def test_several_completions_differ_and_a_seed_repeats_them(llm: LLM):
    params = SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True)
    (first,), (second,) = (llm.generate(PROMPTS[0], params) for _ in range(2))
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({output.text for output in first.outputs}) == 3
    assert [output.text for output in second.outputs] == [o.text for o in first.outputs]


def test_logprobs_have_vllms_form(llm: LLM):
    params = SamplingParams(
        temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=0, ignore_eos=True
    )
    (result,) = llm.generate(PROMPTS[0], params)
    (output,) = result.outputs
    assert output.logprobs is not None
    assert len(output.logprobs) == 5
    total = 0.0
    for token_id, entries in zip(output.token_ids, output.logprobs, strict=True):
        assert len(entries) == 2
        assert entries[token_id].rank == 1
        assert entries[token_id].logprob == max(entry.logprob for entry in entries.values())
        assert isinstance(entries[token_id].decoded_token, str)
        total += entries[token_id].logprob
    assert output.cumulative_logprob == pytest.approx(total)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    for token_id, entry in zip(
        result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True
    ):
        assert entry is not None
        assert set(entry) == {token_id}
        assert entry[token_id].logprob < 0


def test_chat_goes_through_the_template(llm: LLM):
    conversation = [
        {"role": "user", "content": "To be"},
        {"role": "user", "content": "or not to be"},
    ]
    (one,) = llm.chat(conversation, GREEDY)
    (plain,) = llm.generate(one.prompt_token_ids, GREEDY)
    assert one.outputs == plain.outputs
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    assert "To be\n\nor not to be" in tokenizer.decode(one.prompt_token_ids)
    two = llm.chat([conversation, conversation[:1]], GREEDY)
    assert two[0].outputs == one.outputs
    (other,) = llm.chat(conversation, GREEDY, chat_template="{{ messages[0]['content'] }}!")
    assert tokenizer.decode(other.prompt_token_ids, skip_special_tokens=True) == "To be!"


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ({"prompt_token_ids": []}, None, "prompt: empty"),
        ([[1], []], None, "prompt: empty"),
        ({"text": "a"}, None, "prompt: a dict with"),
        ({"prompt": "a", "prompt_token_ids": [1]}, None, "prompt: a dict with"),
        ([-1], None, r"prompt\[0\]: -1"),
        ("a", SamplingParams(top_p=2.0), "top_p: 2.0"),
        (["a", "b"], [SamplingParams()], "sampling_params: 1 given for 2 prompts"),
        ([5] * 5000, None, "prompt: 5000 tokens"),
    ],
)
def test_wrong_calls_are_refused_before_anything_starts(llm: LLM, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)


def test_no_prompts_no_results(llm: LLM):
    assert llm.generate([], GREEDY) == []


def test_unknown_and_impossible_flags_stop_the_start():
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        LLM(str(MODEL), tensor_parallel_size=2)
    with pytest.raises(ConfigError) as caught:
        LLM(str(MODEL), ep_size=3, dtype="int8")
    assert {problem.field for problem in caught.value.problems} >= {"ep_size", "dtype"}


def test_the_package_opens_without_loading_anything():
    code = """
import sys, moe_ep
assert moe_ep.__version__
assert not {"torch", "ray", "transformers"} & set(sys.modules)
moe_ep.SamplingParams
assert not {"torch", "ray", "transformers"} & set(sys.modules)
try:
    moe_ep.Nothing
except AttributeError as error:
    assert "Nothing" in str(error)
else:
    raise SystemExit("an unknown name was found")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
