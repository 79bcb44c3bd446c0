"""Random traffic on tiny pools: nothing leaks, nobody starves, and preemption changes no text."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moe_ep.engine.admission import admission_error
from moe_ep.engine.kv_blocks import BlockPool
from moe_ep.engine.request import EngineRequest, FinishReason, SampledToken, SamplingParams
from moe_ep.engine.scheduler import Scheduler
from tests.engine.fake_model import VOCAB, FakeModel, expected_output, prompt_entry

EOS = 0

params_strategy = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    stop_token_ids=st.sampled_from([(), (1,), (1, 2)]),
    min_tokens=st.integers(0, 6),
    max_tokens=st.none() | st.integers(1, 20),
    ignore_eos=st.booleans(),
    prompt_logprobs=st.none() | st.just(0),
)


def tails(lowest: int, highest: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(lowest, highest), min_size=1, max_size=10)


class Traffic(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 10),
        block_size=st.integers(1, 5),
        seqs=st.integers(1, 5),
        spare=st.integers(0, 7),
        max_model_len=st.integers(2, 30),
        prefix_caching=st.booleans(),
    )
    def start(self, num_blocks, block_size, seqs, spare, max_model_len, prefix_caching):
        self.scheduler = Scheduler(
            pool=BlockPool(num_blocks),
            block_size=block_size,
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + spare,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            prefix_caching=prefix_caching,
        )
        self.model = FakeModel(num_blocks, block_size)
        self.alive: dict[str, EngineRequest] = {}  # in order of arrival
        self.outputs: dict[str, list] = {}
        self.num_added = 0

    @rule(
        begins_like=st.integers(0, 20),
        rest=tails(0, 1) | tails(0, VOCAB - 1),
        params=params_strategy,
    )
    def arrive(self, begins_like, rest, params):
        prompt = [*range(begins_like), *rest]
        if admission_error(len(prompt), params, self.scheduler.limits) is None:
            request = EngineRequest(f"r{self.num_added}", tuple(prompt), params)
            self.scheduler.add(request)
            self.alive[request.request_id] = request
            self.outputs[request.request_id] = []
            self.num_added += 1

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 100))
    def abort(self, number):
        name = list(self.alive)[number % len(self.alive)]
        assert self.scheduler.abort(name) is not None
        del self.alive[name]

    @precondition(lambda self: self.alive)
    @rule()
    def schedule_without_running(self):
        self.check_batch(self.scheduler.schedule())

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 100))
    def step_in_which_one_fails(self, number):
        """What it wrote in this step is wrong, and must not reach anyone else."""
        batch = self.scheduler.schedule()
        sampled = self.model.run(batch)
        tables = {r.request_id: {*r.block_table} for r in self.scheduler._running}
        members = [*batch.decodes, *(chunk.request for chunk in batch.prefills)]
        # Those who share what is spoilt would fail with it.
        alone = [
            member
            for member in members
            if sum(bool(table & {*member.block_table}) for table in tables.values()) == 1
        ]
        if alone:
            failed = alone[number % len(alone)]
            self.model.spoil(failed)
            token = sampled.get(failed.request_id, SampledToken(None))
            sampled[failed.request_id] = replace(token, error="spoilt")
        for output in self.scheduler.update(batch, sampled):
            if output.finish_reason is FinishReason.ABORT:
                del self.alive[output.request_id]
            else:
                self.take(output)

    @precondition(lambda self: self.alive)
    @rule()
    def step(self):
        computed = {r.request_id: r.num_computed_tokens for r in self.scheduler._running}
        batch = self.scheduler.schedule()
        self.check_batch(batch)
        self.check_preempted_are_younger(computed)
        for output in self.scheduler.update(batch, self.model.run(batch)):
            self.take(output)

    def take(self, output):
        self.outputs[output.request_id].append(output)
        if output.finish_reason is not None:
            self.check_finished(self.alive.pop(output.request_id))

    def check_batch(self, batch):
        scheduler = self.scheduler
        assert batch.num_tokens <= scheduler.max_num_batched_tokens
        assert scheduler.num_running <= scheduler.max_num_seqs
        requests = batch.decodes + [chunk.request for chunk in batch.prefills]
        names = [request.request_id for request in requests]
        assert next(iter(self.alive)) in names, "the oldest request does not progress"
        assert len(set(names)) == len(names)
        assert all(request.is_decode for request in batch.decodes)
        for group in (requests[: len(batch.decodes)], requests[len(batch.decodes) :]):
            assert [r.arrival for r in group] == sorted(r.arrival for r in group)
        for chunk in batch.prefills:
            assert not chunk.request.is_decode
            assert chunk.start == chunk.request.num_computed_tokens
            assert chunk.length >= 1
            end = chunk.start + chunk.length
            assert chunk.is_last == (end == len(chunk.request.token_ids))
            assert end <= len(chunk.request.block_table) * scheduler.limits.block_size
        left_out = [r for r in scheduler._running if r.is_decode and r not in batch.decodes]
        if left_out:  # only the youngest may miss a step, and only for want of a block
            assert left_out == scheduler._running[-1:]
            assert scheduler.pool.num_free == 0

    def check_preempted_are_younger(self, computed):
        running = {request.request_id: request.arrival for request in self.scheduler._running}
        for request in self.scheduler._running:  # preempted and started again in one go?
            known = request.num_computed_tokens // self.scheduler.limits.block_size
            start = known * self.scheduler.limits.block_size
            assert request.num_computed_tokens == computed.get(request.request_id, start)
        lost = [int(name[1:]) for name in computed if name not in running]
        kept = [arrival for name, arrival in running.items() if name in computed]
        assert not lost or max(kept) < min(lost)

    def check_finished(self, request):
        outputs = self.outputs[request.request_id]
        tokens = [token for output in outputs for token in output.token_ids]
        limits = self.scheduler.limits
        assert tokens == expected_output(request, EOS, min(limits.max_model_len, limits.capacity))
        prompt = list(request.prompt_token_ids)
        entries = [prompt_entry(prompt[:i], prompt[i]) for i in range(1, len(prompt))]
        expected = None if request.params.prompt_logprobs is None else (None, *entries)
        assert [o.prompt_logprobs for o in outputs] == [expected] + [None] * (len(outputs) - 1)

    @invariant()
    def nothing_leaks(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # Every step computes at least one token of the oldest request, which never loses one.
        for _ in range(sum(request.max_len for request in self.scheduler._requests.values())):
            if self.alive:
                self.step()
        assert not self.alive
        assert not self.scheduler.has_work
        assert self.scheduler.kv_tokens == 0
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
