"""What both DeepEP adapters ask of the library and of a spec. Importing this imports no library.

The library is reached through this module alone, so that one place knows how it fails to load.
"""

import importlib
from types import ModuleType

import torch
from torch.utils import deterministic

from moe_ep.dispatch.base import DispatchSpec
from moe_ep.dispatch.routing import spec_problem
from moe_ep.fp8 import FP8


def load_deep_ep() -> ModuleType:
    return importlib.import_module("deep_ep")


def library_problem() -> str | None:
    """Why ``deep_ep`` cannot work in this process; None when it can."""
    try:
        library = load_deep_ep()
    except (ImportError, AssertionError, OSError) as error:  # NCCL and CUDA checks assert
        return f"deep_ep cannot be imported: {type(error).__name__}: {error}"
    if not hasattr(library, "ElasticBuffer"):
        return f"deep_ep {getattr(library, '__version__', '')}: 2.0 or newer needed"
    fills = getattr(deterministic, "fill_uninitialized_memory")  # noqa: B009, unknown to mypy
    if torch.are_deterministic_algorithms_enabled() and fills:
        return (
            "deep_ep refuses torch.use_deterministic_algorithms with "
            "torch.utils.deterministic.fill_uninitialized_memory; set the latter to False"
        )
    return None


def common_problem(spec: DispatchSpec) -> str | None:
    """What neither generation of DeepEP can serve."""
    if (problem := spec_problem(spec)) is not None:
        return problem
    if spec.payload_dtype not in (FP8, torch.bfloat16):
        return f"payload_dtype: {spec.payload_dtype} given, deep_ep sends FP8 or bfloat16"
    if spec.out_dtype is not torch.bfloat16:
        return f"out_dtype: {spec.out_dtype} given, deep_ep combines bfloat16 only"
    if spec.num_ranks < 2:
        return f"num_ranks: {spec.num_ranks} given, deep_ep needs at least 2"
    if spec.num_sms < 2 or spec.num_sms % 2:  # a channel is a pair
        return f"num_sms: {spec.num_sms} given, an even number from 2 on needed"
    return None
