"""Every user flag, what it may be, and what "auto" becomes. The one place of validation.

The command line and docs/flags.md are generated from the fields of ``EngineConfig``. Problems are
collected, never raised one by one: ``validate`` and ``moe-ep check`` show all of them. Whether a
backend can serve these sizes is asked from the backend (its ``supports``), not answered here.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moe_ep.config.checks import find_problems
from moe_ep.config.flag import flag
from moe_ep.config.model import ModelConfig
from moe_ep.config.problems import ConfigError, Problem

# Reading hundreds of gigabytes takes its time; a rank that dies while loading is noticed at once.
LOAD_TIMEOUT_S = 3600.0


class Choice(NamedTuple):
    """One setting that was left open, what it became and why; for the start-up log."""

    field: str
    value: object
    reason: str


@dataclass(frozen=True)
class EngineConfig:
    """What the user asked for. ``resolve`` gives what will run."""

    model: str = flag(
        help="Directory of a Hugging Face checkpoint, or the name of a built-in geometry.",
        sglang="--model-path",
        vllm="--model",
    )
    tokenizer: str | None = flag(
        None,
        help="Directory of the tokenizer; the model's by default.",
        sglang="--tokenizer-path",
        vllm="--tokenizer",
    )
    served_model_name: str | None = flag(
        None,
        help="Name of the model in the HTTP API; the model argument by default.",
        sglang="--served-model-name",
        vllm="--served-model-name",
    )
    load_format: str = flag(
        "auto",
        help="Where weights come from; dummy makes random ones of the right shapes.",
        sglang="--load-format",
        vllm="--load-format",
        choices=("auto", "safetensors", "dummy"),
    )
    dtype: str = flag(
        "auto",
        help="Compute type; auto is float32 for float32 checkpoints, else bfloat16.",
        sglang="--dtype",
        vllm="--dtype",
        choices=("auto", "bfloat16", "float32"),
    )
    seed: int = flag(
        0,
        help="Seed of dummy weights and of requests that bring none.",
        sglang="--random-seed",
        vllm="--seed",
    )
    ep_size: int = flag(
        1,
        help="Ranks that share the routed experts.",
        scope="total",
        sglang="--ep-size",
        vllm="--data-parallel-size with --enable-expert-parallel",
    )
    attn_dp_size: int | None = flag(
        None,
        help="Groups of ranks that hold different requests; the EP size by default.",
        scope="total",
        sglang="--dp-size with --enable-dp-attention",
        vllm="--data-parallel-size",
    )
    ep_num_redundant_experts: int = flag(
        0,
        help="Extra expert slots per layer for replicas of hot experts.",
        scope="total",
        sglang="--ep-num-redundant-experts",
        vllm="--eplb-config num_redundant_experts",
    )
    init_expert_location: str = flag(
        "trivial",
        help="Where experts are at the start: trivial (in order), or a .json or .pt file with a"
        " placement or with loads to place them by.",
        sglang="--init-expert-location",
    )
    ep_dispatch_algorithm: str = flag(
        "static",
        help="How a rank chooses among an expert's replicas: static uses one of them, its own if it"
        " has one; balanced splits tokens over all, more of them to lightly loaded ranks.",
        sglang="--ep-dispatch-algorithm",
        choices=("static", "balanced"),
    )
    enable_eplb: bool = flag(
        False,
        help="Re-place experts by their measured loads while the engine runs.",
        sglang="--enable-eplb",
        vllm="--enable-eplb",
    )
    eplb_rebalance_num_iterations: int = flag(
        1000,
        help="Steps whose loads decide the next placement.",
        sglang="--eplb-rebalance-num-iterations",
        vllm="--eplb-config step_interval",
    )
    eplb_min_rebalancing_utilization_threshold: float = flag(
        1.0,
        help="Mean over maximum of the ranks' tokens, 0 to 1, above which experts stay in place.",
        sglang="--eplb-min-rebalancing-utilization-threshold",
    )
    eplb_node_traffic_price: float = flag(
        0.0,
        help="What a token's copy to another machine costs, in (token, expert) pairs that a rank"
        " computes in the meantime; 0 places experts by balance alone.",
    )
    eplb_bytes_per_step: int = flag(
        64 << 20,
        help="Most bytes of experts that a rank moves beside one step, or else one expert.",
        scope="per rank",
    )
    expert_distribution_recorder_mode: str = flag(
        "off",
        help="What /dump_expert_distribution_record writes: tokens of each expert per step (stat;"
        " exact under stat_approx too), or of each slot, a file per rank (per_pass).",
        sglang="--expert-distribution-recorder-mode",
        choices=("off", "stat", "stat_approx", "per_pass"),
    )
    expert_distribution_recorder_buffer_size: int = flag(
        1000,
        help="Last steps that the recorder keeps.",
        sglang="--expert-distribution-recorder-buffer-size",
    )
    ep_dispatch_dtype: str = flag(
        "auto",
        help="Type of tokens on their way to experts; auto is fp8 under bfloat16 (bfloat16 where"
        " nothing travels and the weights are not FP8), else float32.",
        choices=("auto", "fp8", "bfloat16", "float32"),
    )
    moe_a2a_backend: str = flag(
        "auto",
        help="How tokens reach their experts.",
        sglang="--moe-a2a-backend",
        vllm="--all2all-backend",
        choices=("auto", "deepep", "deepep_v2", "collective", "local"),
    )
    deepep_mode: str = flag(
        "auto",
        help="Exchange mode; auto is low_latency in steps where no rank prefills, else normal.",
        sglang="--deepep-mode",
        choices=("auto", "normal", "low_latency"),
    )
    moe_runner_backend: str = flag(
        "auto",
        help="Grouped GEMM of the experts.",
        sglang="--moe-runner-backend",
        vllm="--moe-backend",
        choices=("auto", "deep_gemm", "triton", "torch"),
    )
    attention_backend: str = flag(
        "auto",
        help="Attention kernels.",
        sglang="--attention-backend",
        vllm="--attention-backend",
        choices=("auto", "flash_mla", "triton", "torch"),
    )
    enable_two_batch_overlap: bool = flag(
        False,
        help="Run large steps as two micro-batches in turns, so that one computes while the other's"
        " tokens travel.",
        sglang="--enable-two-batch-overlap",
        vllm="--enable-dbo",
    )
    tbo_token_threshold: int | None = flag(
        None,
        help="Fewest tokens, of the fullest rank, in a step that runs as two micro-batches; 128 in"
        " decode steps and 512 in others by default.",
        scope="per rank",
        vllm="--dbo-decode-token-threshold and --dbo-prefill-token-threshold",
    )
    max_model_len: int | None = flag(
        None,
        help="Most tokens of one request, prompt and output; the model's limit by default.",
        sglang="--context-length",
        vllm="--max-model-len",
    )
    max_num_seqs: int = flag(
        64,
        help="Most requests in one step.",
        scope="per rank",
        sglang="--max-running-requests",
        vllm="--max-num-seqs",
    )
    max_num_batched_tokens: int = flag(
        2048,
        help="Most tokens in one step; longer prompts are prefilled in chunks.",
        scope="per rank",
        sglang="--chunked-prefill-size",
        vllm="--max-num-batched-tokens",
    )
    num_kv_blocks: int | None = flag(
        None,
        help="Cache blocks of 64 tokens; from the free memory by default.",
        scope="per rank",
        sglang="--max-total-tokens",
        vllm="--num-gpu-blocks-override",
    )
    gpu_memory_utilization: float = flag(
        0.9,
        help="Share of the device's memory to use, weights included.",
        scope="per rank",
        sglang="--mem-fraction-static",
        vllm="--gpu-memory-utilization",
    )
    kv_cache_dtype: str = flag(
        "auto",
        help="Type of cached latents; auto is the compute type.",
        sglang="--kv-cache-dtype",
        vllm="--kv-cache-dtype",
        choices=("auto", "bfloat16", "float32"),
    )
    enable_prefix_caching: bool = flag(
        True,
        help="Start a request after what the cache still knows of its tokens.",
        sglang="--disable-radix-cache",
        vllm="--enable-prefix-caching",
    )
    enforce_eager: bool = flag(
        False,
        help="Never capture decode steps as CUDA graphs.",
        sglang="--disable-cuda-graph",
        vllm="--enforce-eager",
    )
    cuda_graph_bs: tuple[int, ...] | None = flag(
        None,
        help="Token counts, in rising order, to which decode steps are padded, and for which they"
        " are captured as CUDA graphs where the backends allow it; up to max_num_seqs by default"
        " where they do, else none.",
        scope="per rank",
        sglang="--cuda-graph-bs",
        vllm="--cudagraph-capture-sizes",
    )
    watchdog_timeout_s: float = flag(
        30.0,
        help="Seconds after which any wait between ranks fails and names the state of all ranks.",
        sglang="--watchdog-timeout",
        vllm="--distributed-timeout-seconds",
    )
    step_time_interval: int = flag(
        0,
        help="Record where the time goes in every Nth step, for /metrics; 0 records none.",
    )

    def compute_dtype(self, model: ModelConfig) -> str:
        """The compute type: as given, or by the checkpoint's weights."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if model.dtype == "float32" and not model.quantization else "bfloat16"

    def _payload(self, model: ModelConfig, dtype: str) -> tuple[str, str]:
        """What ``ep_dispatch_dtype`` auto becomes, and why."""
        if dtype == "float32":
            return "float32", "the compute type is float32"
        if self.ep_size == 1 and model.quantization is None:
            return "bfloat16", "nothing travels, and BF16 weights take BF16 activations"
        return "fp8", "half the bytes on the way, or what FP8 weights are multiplied with"

    def resolve(self, model: ModelConfig) -> tuple["EngineConfig", list[Choice]]:
        """A config with as little left open as can be, and each choice with its reason.

        What cannot be known before a step or before the device is seen stays: ``deepep_mode`` auto
        (per step), the three backends (``moe_ep.engine.backends`` asks them), ``cuda_graph_bs``
        None (``moe_ep.engine.graphs`` asks what can be captured), ``num_kv_blocks`` None (from
        memory), ``tbo_token_threshold`` None (a default for each phase), ``tokenizer`` None (token
        ids only). Expects that ``find_problems`` found none.
        """
        choices: list[Choice] = []

        def settle(name: str, value: object, reason: str) -> None:
            if getattr(self, name) in (None, "auto"):
                choices.append(Choice(name, value, reason))

        dtype = self.compute_dtype(model)
        weights = model.quantization or model.dtype
        settle("dtype", dtype, f"the checkpoint holds {weights} weights")
        settle("load_format", "safetensors", "weights are read from the model's directory")
        settle("served_model_name", self.model, "no other name was given")
        settle("attn_dp_size", self.ep_size, "every rank holds its own requests")
        settle("ep_dispatch_dtype", *self._payload(model, dtype))
        settle("max_model_len", model.max_position_embeddings, "max_position_embeddings")
        settle("kv_cache_dtype", dtype, "the compute type")
        if (Path(self.model) / "tokenizer_config.json").exists():
            settle("tokenizer", self.model, "the model's directory has one")
        settled: dict[str, Any] = {choice.field: choice.value for choice in choices}
        return dataclasses.replace(self, **settled), choices


def validate(engine: EngineConfig) -> ModelConfig:
    """Read the model's config; ConfigError with every problem of the model and of the flags."""
    problems: list[Problem] = []
    model = None
    if isinstance(engine.model, str):
        try:
            model = ModelConfig.from_path(engine.model)
        except ConfigError as error:
            problems += error.problems
    problems += find_problems(engine, model)
    if problems or model is None:
        raise ConfigError(problems)
    return model
