"""``moe-ep generate``: continue prompts and stream them to the terminal, in the order given."""

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from launch.continuation import Delta, continue_prompt, interleave
from launch.flags import from_args, sampling_params
from launch.launch_config import ClusterConfig
from launch.lifetime import StopSignals, running_engine
from launch.params import check_params, check_token_ids
from moe_ep.config import EngineConfig
from moe_ep.engine.request import SamplingParams

if TYPE_CHECKING:
    from launch.client import EngineClient

Prompt = str | list[int]


def run(args: argparse.Namespace) -> int:
    prompts: list[Prompt] = [*args.prompt, *args.prompt_token_ids]
    if not prompts:
        print("generate needs a --prompt or --prompt-token-ids", file=sys.stderr)
        return 2
    config, cluster = from_args(EngineConfig, args), from_args(ClusterConfig, args)
    return asyncio.run(_generate(config, cluster, prompts, sampling_params(args)))


async def _generate(
    config: EngineConfig, cluster: ClusterConfig, prompts: Sequence[Prompt], params: SamplingParams
) -> int:
    with StopSignals():
        async with running_engine(config, cluster) as client:
            try:
                ids = [_checked(client, prompt, params) for prompt in prompts]
            except ValueError as error:
                print(error, file=sys.stderr)
                return 2
            tokenizer = client.tokenizer
            streams = [
                continue_prompt(client, tokenizer, prompt_ids, params, f"generate-{i}")
                for i, prompt_ids in enumerate(ids)
            ]
            await _print_in_order(prompts, streams, has_text=tokenizer is not None)
    return 0


def _checked(client: "EngineClient", prompt: Prompt, params: SamplingParams) -> list[int]:
    """The prompt's token ids; ValueError naming the field of what the engine would refuse."""
    tokenizer, vocab_size = client.tokenizer, client.info.vocab_size
    if tokenizer is None and (isinstance(prompt, str) or params.stop):
        raise ValueError("--prompt and --stop need a tokenizer, and this model has none")
    if isinstance(prompt, str):
        assert tokenizer is not None
        ids = tokenizer.encode(prompt)
    else:
        ids = prompt
    check_params(params, vocab_size)
    check_token_ids(ids, vocab_size)
    client.check_admission(len(ids), params)
    return ids


async def _print_in_order(
    prompts: Sequence[Prompt], streams: Sequence[AsyncGenerator[Delta, None]], *, has_text: bool
) -> None:
    """All prompts run at once; one is printed live, those after it when their turn comes."""
    unprinted = [prompt if isinstance(prompt, str) else "" for prompt in prompts]
    is_done = [False] * len(prompts)
    turn = 0
    async with aclosing(interleave(streams)) as arrivals:
        async for index, delta in arrivals:
            unprinted[index] += (
                delta.text if has_text else "".join(f"{i} " for i in delta.token_ids)
            )
            is_done[index] = delta.finish_reason is not None
            while turn < len(prompts):
                print(unprinted[turn], end="", flush=True)
                unprinted[turn] = ""
                if not is_done[turn]:
                    break
                print("\n", flush=True)
                turn += 1
