"""Which backends run: each is asked by its own predicate, and "auto" takes the first that can.

Asked once, at start, by the engine and by ``moe-ep check`` alike. Experts come first: the exchange
must deliver rows as they need them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import attention
from moe_ep import dispatch, experts
from moe_ep.config import Choice, ConfigError, EngineConfig, ModelConfig, Problem
from moe_ep.dispatch import DispatchSpec
from moe_ep.engine.specs import DTYPES, dispatch_spec, expert_spec
from moe_ep.model.build import attention_spec

EXPERTS, EXCHANGE, ATTENTION = "moe_runner_backend", "moe_a2a_backend", "attention_backend"


class Answer(NamedTuple):
    """What one backend says of this model on this device, in the exchange modes of the config.

    setting: the flag's field that chooses it. reason: why it cannot serve, None when it can.
    """

    setting: str
    backend: str
    reason: str | None


def resolve_backends(
    config: EngineConfig, model: ModelConfig, device: torch.device
) -> tuple[EngineConfig, list[Choice]]:
    """The config with all three backends named, and why each was taken.

    config: as ``EngineConfig.resolve`` leaves it. Raises ConfigError, with every backend that can
    and why the others cannot, for those asked for by name in vain.
    """
    answers = backend_answers(config, model, device)
    choices = [_choose(getattr(config, name), _of(answers, name)) for name in _settings(answers)]
    problems = [choice for choice in choices if isinstance(choice, Problem)]
    if problems:
        raise ConfigError(problems)
    made = [choice for choice in choices if isinstance(choice, Choice)]
    named: dict[str, Any] = {choice.field: choice.value for choice in made}
    return dataclasses.replace(config, **named), made


def backend_answers(config: EngineConfig, model: ModelConfig, device: torch.device) -> list[Answer]:
    """Every registered backend's answer, by setting, in the order in which "auto" takes them."""
    spec = expert_spec(config, model, device)
    runners = _sorted(
        [_ask(EXPERTS, name, load, spec) for name, load in experts.BACKENDS.items()], device
    )
    runner = _choose(config.moe_runner_backend, runners)
    if isinstance(runner, Choice):
        named = dataclasses.replace(config, moe_runner_backend=str(runner.value))
        exchange = exchange_spec(named, model, device)
    else:
        exchange = dispatch_spec(config, model)
    mla = attention_spec(model, DTYPES[config.dtype])
    kernels = [
        Answer(ATTENTION, name, attention.attention_problem(name, mla))
        for name in attention.attention_backend_names()
    ]
    return [
        *runners,
        *(_ask(EXCHANGE, name, load, exchange) for name, load in dispatch.BACKENDS.items()),
        *_sorted(kernels, device),
    ]


def exchange_spec(config: EngineConfig, model: ModelConfig, device: torch.device) -> DispatchSpec:
    """What the exchange must serve when the experts are on the backend that the config names. They
    say what they need of the rows: a bank of one slot, which is soon made, is asked."""
    one_slot = dataclasses.replace(expert_spec(config, model, device), num_slots=1)
    bank = experts.create_experts(config.moe_runner_backend, one_slot)
    return dispatch_spec(
        config, model, row_alignment=bank.row_alignment, scale_format=bank.scale_format
    )


def _ask(setting: str, backend: str, load: Callable[[], Any], spec: object) -> Answer:
    try:
        return Answer(setting, backend, load().supports(spec))
    except ImportError as error:
        return Answer(setting, backend, f"its library cannot be imported: {error}")


def _sorted(answers: list[Answer], device: torch.device) -> list[Answer]:
    """Libraries first; then Triton's kernels before plain torch, but not in their interpreter."""
    last = "torch" if device.type == "cuda" else "triton"
    return sorted(answers, key=lambda answer: answer.backend == last)


def _settings(answers: Sequence[Answer]) -> list[str]:
    return list(dict.fromkeys(answer.setting for answer in answers))


def _of(answers: Sequence[Answer], setting: str) -> list[Answer]:
    return [answer for answer in answers if answer.setting == setting]


def _choose(name: str, answers: Sequence[Answer]) -> Choice | Problem:
    """answers: of one setting, the preferred backend first."""
    setting = answers[0].setting
    able = [answer.backend for answer in answers if answer.reason is None]
    others = [f"{answer.backend}: {answer.reason}" for answer in answers if answer.reason]
    if name in able:
        return Choice(setting, name, "asked for")
    if name == "auto" and able:
        first = [answer.backend for answer in answers].index(able[0])
        return Choice(setting, able[0], "; ".join(others[:first]) or "the first that serves")
    allowed = ", ".join(able) or "nothing on this machine"
    return Problem(setting, name, allowed, f"Cannot serve this model here: {'; '.join(others)}.")
