"""Settings of cluster and HTTP service; flags and docs come from them as from ``EngineConfig``."""

from dataclasses import dataclass

from moe_ep.config import flag


@dataclass(frozen=True)
class ClusterConfig:
    """Where the ranks run."""

    ray_address: str | None = flag(
        None,
        help="Ray cluster to join, RAY_ADDRESS by default; a local one is started without either.",
        vllm="RAY_ADDRESS",
    )


@dataclass(frozen=True)
class ServerConfig:
    """Where the service listens and how long or how much it lets a client take."""

    host: str = flag("127.0.0.1", help="Address to listen on.", sglang="--host", vllm="--host")
    port: int = flag(
        8000, help="Port to listen on; 0 takes a free one.", sglang="--port", vllm="--port"
    )
    max_queued_requests: int = flag(
        1024,
        help="Continuations that may wait beyond those that can run; more are answered with 429.",
        scope="total",
        sglang="--max-queued-requests",
    )
    max_body_bytes: int = flag(
        16 * 2**20, help="Largest request body; a larger one is answered with 413."
    )
    expert_distribution_recorder_dir: str = flag(
        "/tmp",
        help="Directory of the files that /dump_expert_distribution_record writes.",
        sglang="SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR",
    )
    request_timeout_s: float = flag(
        3600.0, help="Seconds after which a request is aborted and answered with 504."
    )
    shutdown_timeout_s: float = flag(
        30.0, help="Seconds that running requests get to finish after SIGTERM or Ctrl-C."
    )
