"""Configuration of model and engine: every flag, every field of config.json, all validation.

Imports nothing heavy, so that ``moe-ep --help`` stays quick.
"""

from moe_ep.config.checks import find_problems
from moe_ep.config.engine import LOAD_TIMEOUT_S, Choice, EngineConfig, validate
from moe_ep.config.flag import flag
from moe_ep.config.model import ModelConfig, geometry_names
from moe_ep.config.problems import ConfigError, Problem
from moe_ep.config.rope import YarnConfig

__all__ = [
    "LOAD_TIMEOUT_S",
    "Choice",
    "ConfigError",
    "EngineConfig",
    "ModelConfig",
    "Problem",
    "YarnConfig",
    "find_problems",
    "flag",
    "geometry_names",
    "validate",
]
