"""Puts one rank's engine together: backends, placement, weights, cache, scheduler.

Everything that is decided once, at start, is decided here, and each choice is kept with its reason.
"""

import logging
from dataclasses import dataclass

import torch

from attention import BLOCK_SIZE, AttentionBackend, LatentCache, create_attention
from moe_ep.config import LOAD_TIMEOUT_S, Choice, EngineConfig, ModelConfig, validate
from moe_ep.dispatch import BACKENDS as DISPATCHERS
from moe_ep.dispatch import Dispatcher, create_dispatcher
from moe_ep.engine import graphs
from moe_ep.engine.admission import AdmissionLimits
from moe_ep.engine.backends import exchange_spec, resolve_backends
from moe_ep.engine.eplb import Balancer, initial_location
from moe_ep.engine.host import use_huge_pages
from moe_ep.engine.kv_blocks import BlockPool, blocks_needed
from moe_ep.engine.micro_batches import TokenCost
from moe_ep.engine.room import Room
from moe_ep.engine.runner import Runner
from moe_ep.engine.sampler import Sampler
from moe_ep.engine.scheduler import Scheduler
from moe_ep.engine.specs import DTYPES, expert_spec, step_rules
from moe_ep.engine.step_sampling import StepSampling
from moe_ep.engine.step_shape import StepRules
from moe_ep.engine.step_sync import GroupSync, LocalSync, StepSync
from moe_ep.engine.warm_up import warm_up
from moe_ep.engine.world import World
from moe_ep.experts import Experts, create_experts
from moe_ep.model.build import DecoderParts, attention_spec, build_decoder
from moe_ep.model.decoder import Decoder
from moe_ep.model.loader import CheckpointSource, progress_bar
from moe_ep.model.weights import DummySource, LoadReport
from moe_ep.progress import Progress, Stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineInfo:
    """What the front end needs to know of a rank that has started.

    limits: what the rank can hold. kv_cache_bytes: reserved for it. choices: settings that were
    left open, what they became and why.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    limits: AdmissionLimits
    kv_cache_bytes: int
    choices: list[Choice]
    load_report: LoadReport


@dataclass(frozen=True)
class Assembly:
    """The parts of one rank's engine, ready to run."""

    info: EngineInfo
    scheduler: Scheduler
    pool: BlockPool
    runner: Runner
    decoder: Decoder
    dispatcher: Dispatcher
    sync: StepSync
    step_rules: StepRules
    progress: Progress
    sampling: StepSampling
    balancer: Balancer


def assemble(config: EngineConfig, world: World) -> Assembly:
    """Choose backends, load this rank's share, size the cache. Collective.

    Raises ConfigError or LoadError with everything that is wrong at once, MemoryError when the
    exchange buffers or the cache have no room.
    """
    model = validate(config)
    config, choices = config.resolve(model)
    config, backends = resolve_backends(config, model, world.device)
    choices += backends
    _check_agreement(config, world)
    config, captures = graphs.resolve_graphs(config, world)
    choices += captures
    if world.rank == 0:
        for choice in choices:
            logger.info("%s = %s: %s", choice.field, choice.value, choice.reason)
    return _Assembler(config, model, world, choices).assemble()


def _check_agreement(config: EngineConfig, world: World) -> None:
    """Unlike machines may choose unlike backends, whose exchanges would wait for each other."""
    chosen = world.gather((config.moe_a2a_backend, config.moe_runner_backend))
    if len(set(chosen)) > 1:
        raise RuntimeError(
            "moe_a2a_backend, moe_runner_backend: ranks have chosen differently,"
            f" {chosen} in rank order; name backends that all of them have"
        )


class _Assembler:
    """Carries what the steps of ``assemble`` share; ``config`` is resolved, backends included."""

    def __init__(
        self, config: EngineConfig, model: ModelConfig, world: World, choices: list[Choice]
    ) -> None:
        self.config = config
        self.model = model
        self.world = world
        self.choices = choices
        self.dtype = DTYPES[config.dtype]
        self.device = world.device
        self.expert_spec = expert_spec(config, model, world.device)
        self.progress = Progress()
        self.rules = step_rules(config)
        self.room = Room(config, model, world)
        self.location = initial_location(config, model, world)

    def assemble(self) -> Assembly:
        spec = attention_spec(self.model, self.dtype)
        attention = create_attention(self.config.attention_backend, spec, device=self.device)
        dispatcher = self._dispatcher()  # its buffers first: the cache gets what is left
        self.room.check_weights(self.expert_spec.num_slots)
        with self.world.together("loading", LOAD_TIMEOUT_S):
            decoder, report = self._load(attention, dispatcher)
            if self.device.type == "cpu":
                use_huge_pages()
        cache = self._cache()
        pool = BlockPool(cache.num_blocks)
        scheduler = self._scheduler(pool)
        runner = Runner(
            decoder=decoder,
            cache=cache,
            attention=attention,
            dispatcher=dispatcher,
            sampler=Sampler(self.model.eos_token_ids),
            token_cost=TokenCost.of(self.model),
        )
        if self.device.type == "cuda":
            self._warm_up(runner)
        self._capture(runner)
        return Assembly(
            info=EngineInfo(
                vocab_size=self.model.vocab_size,
                eos_token_ids=self.model.eos_token_ids,
                limits=scheduler.limits,
                kv_cache_bytes=cache.tensor.nbytes,
                choices=self.choices,
                load_report=report,
            ),
            scheduler=scheduler,
            pool=pool,
            runner=runner,
            decoder=decoder,
            dispatcher=dispatcher,
            sync=self._sync(),
            step_rules=self.rules,
            progress=self.progress,
            sampling=StepSampling(self.config.step_time_interval, self.progress, self.world),
            balancer=Balancer(
                self.config, self.model, self.location.placement, decoder.moe_layers, self.world
            ),
        )

    def _dispatcher(self) -> Dispatcher:
        backend = self.config.moe_a2a_backend
        spec = exchange_spec(self.config, self.model, self.device)
        self.room.check_buffers(DISPATCHERS[backend]().buffer_bytes(spec))
        dispatcher = create_dispatcher(backend, spec, self.world.group)
        progress = self.progress
        dispatcher.listener = lambda part: progress.enter_within(Stage(part))
        return dispatcher

    def _new_experts(self) -> Experts:
        return create_experts(self.config.moe_runner_backend, self.expert_spec)

    def _load(
        self, attention: AttentionBackend, dispatcher: Dispatcher
    ) -> tuple[Decoder, LoadReport]:
        parts = DecoderParts(
            dtype=self.dtype,
            device=self.device,
            keeps_fp8=self.config.moe_runner_backend == "deep_gemm" and self.expert_spec.is_fp8,
            attention=attention,
            dispatcher=dispatcher,
            make_experts=self._new_experts,
            placement=self.location.placement,
            slot_table=self.location.slot_table,
            rank=self.world.rank,
            progress=self.progress,
        )
        if self.config.load_format == "dummy":
            dummy = DummySource(self.model, self.config.seed)
            return build_decoder(self.model, dummy, parts), dummy.report()
        source = CheckpointSource(self.config.model, self.model)
        layers = range(self.model.num_moe_layers)
        placement = self.location.placement
        experts = [placement.local_experts(layer, self.world.rank) for layer in layers]
        with progress_bar(source, experts, is_shown=self.world.rank == 0):
            decoder = build_decoder(self.model, source, parts)
        logger.info("rank %d: %s", self.world.rank, source.report())
        return decoder, source.report()

    def _cache(self) -> LatentCache:
        dtype = DTYPES[self.config.kv_cache_dtype]
        num_layers, latent_dim = self.model.num_layers, self.model.latent_dim
        bytes_per_block = LatentCache.bytes_per_block(
            num_layers=num_layers, latent_dim=latent_dim, dtype=dtype
        )
        return LatentCache(
            num_layers=num_layers,
            num_blocks=self.room.cache_blocks(bytes_per_block, self._max_model_len),
            latent_dim=latent_dim,
            dtype=dtype,
            device=self.device,
        )

    def _warm_up(self, runner: Runner) -> None:
        with self.world.together("making kernels", LOAD_TIMEOUT_S):
            budget = self.rules.token_budget(self.config.max_num_batched_tokens)
            warm_up(runner, self.rules, num_ranks=self.world.num_ranks, most_tokens=budget)

    def _capture(self, runner: Runner) -> None:
        """Graphs of decode steps, unless some rank cannot have them. Collective."""
        maker = None if self.config.enforce_eager else graphs.graph_maker(self.device)
        if maker is None:
            return
        free, sizes = self.room.free_bytes(), graphs.step_sizes(self.rules)
        step_graphs = graphs.StepGraphs(
            maker=maker,
            mode=graphs.graph_mode(self.config),
            attention=runner.attention,
            dispatcher=runner.dispatcher,
            cache=runner.cache,
            max_blocks=blocks_needed(self._max_model_len, BLOCK_SIZE),
        )
        try:
            runner.capture(step_graphs, sizes)
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"cuda_graph_bs: {self.config.cuda_graph_bs} given; no room to capture such steps"
                f" beside weights and cache on rank {self.world.rank}: lower"
                " gpu_memory_utilization, give fewer sizes, or use enforce_eager"
            ) from error
        taken = free - self.room.free_bytes()
        logger.info("rank %d: %d graphs: %d bytes", self.world.rank, len(sizes), taken)

    @property
    def _max_model_len(self) -> int:
        return self.config.max_model_len or self.model.max_position_embeddings

    def _scheduler(self, pool: BlockPool) -> Scheduler:
        config = self.config
        return Scheduler(
            pool=pool,
            block_size=BLOCK_SIZE,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=self.rules.token_budget(config.max_num_batched_tokens),
            max_model_len=self._max_model_len,
            eos_token_ids=self.model.eos_token_ids,
            prefix_caching=config.enable_prefix_caching,
        )

    def _sync(self) -> StepSync:
        world = self.world
        if world.group is None or world.store is None:
            return LocalSync()
        return GroupSync(
            group=world.group,
            store=world.store,
            rank=world.rank,
            num_ranks=world.num_ranks,
            timeout_s=world.timeout_s,
        )
