"""The only owner of device state: parameters, KV cache and compiled steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.execution.batch_builder import BatchBuilder, add_masks
from jaxinfer.engine.execution.engine_model import EngineModel, abstract
from jaxinfer.engine.execution.executable_cache import compile_or_load
from jaxinfer.engine.execution.params_update import replaced
from jaxinfer.engine.execution.warm_up import WarmUp
from jaxinfer.engine.kv_cache.page_transfers import Content, Copy, CopyPage, PageTransfers, RotatePages, SwapIn, SwapOut
from jaxinfer.engine.kv_cache.tiers import PageTiers
from jaxinfer.engine.scheduling.step import NO_ROWS, Step
from jaxinfer.model.adapted_params import Adapter, Slots, insert_adapter, with_slots
from jaxinfer.model.batch import Batch, StepOutput, VerifyOutput, last_tokens
from jaxinfer.model.cache import KVCache
from jaxinfer.model.joined_params import joints
from jaxinfer.model.params import Params
from jaxinfer.parallel.hosts import Hosts
from jaxinfer.plan.step_shapes import Bucket
from jaxinfer.sampling.batch import SamplingBatch

T = TypeVar("T")
MAX_SOURCE_BYTES = 4096  # of the folder or id of an adapter that several processes read: the longest path of Linux


class Runner:
    """Runs scheduled steps. The shapes that hold any step are compiled before the first step runs.

    A step and a copy donate the cache, which is lost if they fail: `fail` receives each such exception. An exception of
    the host before that, for lack of memory for example, changes nothing: the caller may make the same call again.
    """

    def __init__(
        self,
        params: Params,
        warm_up: WarmUp,
        tiers: PageTiers | None,
        fail: Callable[[BaseException], None],
        hosts: Hosts | None = None,
    ):
        """`hosts`: the processes of the devices, if they are several; `follow` is for all but the first."""
        self._fail, self._hosts = fail, hosts
        compiler = warm_up.compiler
        self.buckets, self._config = compiler.buckets, compiler.model_config
        self._builder = BatchBuilder.of(warm_up.model)
        self.compiled_steps, self._copiers = warm_up.steps, warm_up.copiers
        self._params = self._base_params = params
        self._adapters = AdapterArrays.of(warm_up.model)
        self._join_adapters()
        self._tiers = tiers
        placement = warm_up.model.placement
        # i32[R], sampled by each row of the last step
        self._drawn = placement.put(jnp.zeros((compiler.max_num_rows,), jnp.int32))
        self._before = NO_ROWS  # the rows of the last step
        self._undrawn: Undrawn | None = None  # the draw of the last step that draws apart, if it is still to come
        self._num_pages = warm_up.cache_config.num_pages
        self._cache = placement.init_cache(self._config, warm_up.cache_config)
        self._numbers = {bucket: number for number, bucket in enumerate(self.buckets)}  # of the hosts' executables
        if hosts is not None:
            adapter = np.int32(0), np.zeros((MAX_SOURCE_BYTES,), np.uint8)
            hosts.begin([*compiler.host_arguments, *self._copies_of_pages, adapter])
        if tiers is not None:
            tiers.seconds_per_copy = self._measure_copies()

    @property
    def params(self) -> Params:
        """The parameters of the next step, without those of adapters."""
        return self._base_params

    def update_params(self, params: Params) -> None:
        """Replaces the parameters by others of their shapes and dtypes, with room for one set on the device."""
        with self._reported_failures():
            jax.block_until_ready(self._cache)  # launched steps refer to the old parameters until they end
            params = joints(params, self._config, like=abstract(self._base_params))
            old, structure = jax.tree.flatten(self._base_params)
            assert jax.tree.structure(params) == structure  # else tensors would be freed in vain
            del self._params, self._base_params
            self._base_params = replaced(old, params)
            self._join_adapters()

    def insert_adapter(self, slot: int, adapter: Adapter) -> None:
        """Writes an adapter's tensors into a slot, behind all launched steps; waits until it is there.

        Of several processes each reads it by itself. Raises ValueError, and changes nothing, if another one has not
        found the same numbers.
        """
        if self._hosts is not None:
            source = adapter.source.encode()
            if len(source) > MAX_SOURCE_BYTES:
                raise ValueError(f"path has {len(source)} bytes, more than {MAX_SOURCE_BYTES}; give a shorter one")
            padded = np.frombuffer(source.ljust(MAX_SOURCE_BYTES, b"\0"), np.uint8)
            with self._reported_failures(but=ValueError):  # the other processes wait for this one
                self._tell(self._adapter_number, (np.int32(slot), padded))
                self._hosts.agree({f"adapter {adapter.source!r}": adapter.digest})
        self._write_adapter(slot, adapter.tensors)

    def _follow_adapter(self, read_adapter: Callable[[str], Adapter], slot: np.ndarray, source: np.ndarray) -> None:
        """Reads and writes an adapter as process 0 does, or does nothing if any process has not found its numbers."""
        assert self._hosts is not None
        path, adapter = source.tobytes().rstrip(b"\0").decode(), None
        try:
            adapter = read_adapter(path)
            found = adapter.digest
        except Exception as error:  # the Hub's libraries have errors of several kinds
            found = ascii(f"{type(error).__name__}: {error}")
        try:
            self._hosts.agree({f"adapter {path!r}": found})
        except ValueError:  # process 0 raises it for the caller
            return
        assert adapter is not None  # process 0 has read one
        self._write_adapter(int(slot), adapter.tensors)

    def _write_adapter(self, slot: int, tensors: Slots) -> None:
        assert self._adapters is not None
        placed = self._adapters.place(slot, tensors)
        with self._reported_failures():
            del self._params
            self._adapters.insert(placed)
            self._join_adapters()

    def _join_adapters(self) -> None:
        self._params = self._base_params if self._adapters is None else self._adapters.beside(self._base_params)

    def close(self) -> None:
        """Frees the memory of parameters, cache and compiled steps."""
        self.compiled_steps.cancel()
        if self._hosts is not None:
            self._hosts.close()
        vars(self).clear()  # after a failure some attributes are gone already

    def launch(self, step: Step) -> StepOutput | VerifyOutput:
        """Launches the step behind all earlier ones; returns its output, one row per chunk, then padding rows.

        If the step draws apart, launches its draw too, unless that needs grammar masks, for which it waits for `draw`.
        """
        # An exception of the host leaves the cache as it is, until the step is dispatched.
        bucket, compiled, draw = self.compiled_steps.choose(step)
        arguments = self._builder.build(step, bucket, self._before)
        undrawn = None if draw is None else Undrawn(*draw, last_tokens(arguments[0]), arguments[1])
        has_prompt = bool(step.prompt_log_prob_chunks)
        self._make_copies(step.copies)
        with self._reported_failures():
            self._tell(self._numbers[bucket], arguments)
            output, self._drawn, self._cache = compiled(self._params, self._cache, self._drawn, *arguments)
            self._before, self._undrawn = step.chunks.rows, undrawn
            if isinstance(output, VerifyOutput):
                return output
            # Drop unused outputs, so that they are not copied to the host.
            prompt, logits = output.prompt if has_prompt else None, None if undrawn is None else output.logits
            output = replace(output, prompt=prompt, logits=logits)
            return output if undrawn is None or step.needs_masks else self._dispatch_draw(undrawn.sampling, output)

    def draw(self, step: Step, output: StepOutput | VerifyOutput) -> StepOutput | VerifyOutput:
        """Launches the draw of the last launched step, if it is still to come; returns its output with the tokens."""
        if self._undrawn is None:
            return output
        sampling = add_masks(step, self._undrawn.sampling)
        assert isinstance(output, StepOutput)
        with self._reported_failures():
            return self._dispatch_draw(sampling, output)

    def _dispatch_draw(self, sampling: SamplingBatch, output: StepOutput) -> StepOutput:
        assert self._undrawn is not None
        bucket, draw, batch, _ = self._undrawn
        self._tell(self._numbers[bucket], (batch, sampling))
        drawn, self._drawn = draw(self._cache, self._drawn, batch, sampling, output.logits)
        self._undrawn = None
        return replace(drawn, hidden=output.hidden, prompt=output.prompt)

    def is_done(self, output: StepOutput | VerifyOutput) -> bool:
        """True if a launched step has ended."""
        return output.tokens.is_ready()

    def read(self, output: StepOutput | VerifyOutput) -> StepOutput | VerifyOutput:
        """Waits for a launched step and returns its output as host arrays, except `hidden`."""
        # An interrupt is harmless: the output can be read again. Drafters use the hidden states on the device, and
        # few steps have embeddings to pool.
        with self._reported_failures(Exception):
            hidden = output.hidden
            if self._hosts is not None and hidden is not None:  # other processes take no part in computing with it
                hidden = hidden.addressable_data(0)
            return replace(jax.device_get(replace(output, hidden=None)), hidden=hidden)

    def run(self, step: Step) -> StepOutput | VerifyOutput:
        """Computes the step and returns its output as host arrays, except `hidden`."""
        return self.read(self.draw(step, self.launch(step)))

    def read_pages(self, copies: PageTransfers, pages: Sequence[int], kind: int = 0) -> list[Content]:
        """Makes the pending copies, then returns the contents of pages of a kind."""
        self._make_copies(copies)
        return self._copiers[kind].read(self._cache, pages)

    def lend_cache(self, copies: PageTransfers, compute: Callable[[KVCache], tuple[T, KVCache]]) -> T:
        """Makes the pending copies, then calls `compute` with the cache, which it may replace; returns its result."""
        self._make_copies(copies)
        with self._reported_failures():
            result, self._cache = compute(self._cache)
            return result

    def follow(self, read_adapter: Callable[[str], Adapter]) -> None:
        """Makes the launches of process 0, in their order, until it closes its engine."""
        assert self._hosts is not None
        steps, logits = self.compiled_steps, None
        for number, arguments in self._hosts.launches():
            if number == self._adapter_number:
                self._follow_adapter(read_adapter, *arguments)
            elif number >= len(self.buckets):
                self._cache = self._change_of(number - len(self.buckets), arguments)(self._cache)
            elif (bucket := self.buckets[number]).is_draw:
                _, self._drawn = steps.of(bucket)(self._cache, self._drawn, *arguments, logits)
            else:
                state = self._params, self._cache, self._drawn
                output, self._drawn, self._cache = steps.of(bucket)(*state, *arguments)
                logits = getattr(output, "logits", None)

    def _tell(self, number: int, arguments: Any) -> None:
        """Lets other processes make the launch that follows in this one."""
        if self._hosts is not None:
            self._hosts.tell(number, arguments)

    @property
    def _adapter_number(self) -> int:
        """The number of an adapter's record, after those of executables and copies."""
        return len(self.buckets) + len(self._copies_of_pages)

    @property
    def _copies_of_pages(self) -> list[Any]:
        """The shapes of the arguments of copies: within each kind of pages, and of sink pages."""
        page, sinks = np.int32(0), np.zeros((self._copiers[0].num_sinks,), np.int32)
        return [*[(page, page)] * len(self._copiers), (sinks, sinks, page)]

    def _change_of(self, number: int, arguments: tuple[Any, ...]) -> Callable[[KVCache], KVCache]:
        """Returns the copy with a number in `_copies_of_pages`: from the first of its arguments to the second."""
        if number == len(self._copiers):
            return lambda cache: self._copiers[0].turn(cache, *arguments)
        return lambda cache: self._copiers[number].duplicate(cache, *arguments)

    @contextlib.contextmanager
    def _reported_failures(
        self, kind: type[BaseException] = BaseException, *, but: type[BaseException] | tuple[()] = ()
    ) -> Iterator[None]:
        try:
            yield
        except but:
            raise
        except kind as error:
            self._fail(error)
            raise

    def _make_copies(self, copies: PageTransfers) -> None:
        if copies.queue:
            for batch in copies.batches(self._copiers[0].max_width):
                self._copy(batch)

    def _copy(self, copies: Sequence[Copy]) -> None:
        """Makes copies of one type, a batch of `PageTransfers.batches`."""
        first = copies[0]
        copier = self._copiers[0 if isinstance(first, RotatePages) else first.kind]
        match copies:
            case [SwapOut(), *_]:
                assert self._tiers is not None
                read = [copy for copy in copies if isinstance(copy, SwapOut)]
                contents = copier.read(self._cache, [copy.page for copy in read])
                for copy, content in zip(read, contents, strict=True):
                    self._tiers.put(copy.key, content)
                return
            case [CopyPage(source, page, kind)]:
                change = self._told_change(kind, (np.int32(source), np.int32(page)))
            case [RotatePages(sources, pages, num_positions)]:
                ids = np.array(sources, np.int32), np.array(pages, np.int32)
                change = self._told_change(len(self._copiers), (*ids, np.int32(num_positions)))
            case _:
                written = [copy for copy in copies if isinstance(copy, SwapIn)]
                change = copier.insertion([copy.page for copy in written], [copy.content for copy in written])
        with self._reported_failures():
            self._cache = change(self._cache)

    def _told_change(self, number: int, arguments: tuple[Any, ...]) -> Callable[[KVCache], KVCache]:
        """Returns a copy of `_copies_of_pages`, which tells other processes of itself before it is made."""
        change = self._change_of(number, arguments)

        def tell_and_change(cache: KVCache) -> KVCache:
            self._tell(len(self.buckets) + number, arguments)
            return change(cache)

        return tell_and_change

    def _measure_copies(self) -> float:
        """Returns the seconds per page to copy out of the cache and back in, the best of three runs."""
        seconds = []
        copier = self._copiers[0]
        pages = list(range(min(copier.max_width, self._num_pages)))
        for _ in range(3):
            began = time.perf_counter()
            contents = copier.read(self._cache, pages)
            self._cache = jax.block_until_ready(copier.insertion(pages, contents)(self._cache))
            seconds.append((time.perf_counter() - began) / len(pages))
        return min(seconds)


class Undrawn(NamedTuple):
    """The draw of a launched step."""

    bucket: Bucket
    compiled: jax.stages.Compiled
    batch: Batch  # the last token of each row
    sampling: SamplingBatch  # without masks


def compile_insertion(model: EngineModel) -> jax.stages.Compiled | None:
    """Compiles the function that puts an adapter into its slot; returns None if the engine takes no adapters."""
    slots = model.abstract_slots
    if slots is None:
        return None
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.shape[0], *a.shape[2:]), a.dtype), slots)
    insert = jax.jit(insert_adapter, donate_argnames="slots", out_shardings=model.placement.whole)
    return compile_or_load(insert, slots, *model.placement.replicated((jax.ShapeDtypeStruct((), jnp.int32), one)))


class AdapterArrays:
    """The slots of all weights, of which steps read each row's. Nothing is compiled after the constructor.

    Each device of a mesh has all of them.
    """

    def __init__(self, model: EngineModel) -> None:
        slots, compiled = model.abstract_slots, compile_insertion(model)
        assert compiled is not None  # there are slots
        self._place, self._compiled = model.placement.put, compiled
        self._slots = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), slots)

    @classmethod
    def of(cls, model: EngineModel) -> AdapterArrays | None:
        """Returns the slots of an engine, None if it takes no adapters."""
        return cls(model) if model.engine_config.max_adapters else None

    def beside(self, params: Params) -> Params:
        """Returns the parameters of steps: these with the slots."""
        return with_slots(params, self._slots)

    def place(self, slot: int, tensors: Slots) -> tuple[jax.Array, Slots]:
        """Returns an adapter's tensors on the devices, with their slot, for `insert`."""
        return jax.block_until_ready(self._place((np.int32(slot), tensors)))

    def insert(self, placed: tuple[jax.Array, Slots]) -> None:
        """Writes an adapter into its slot in place, after all launched steps; voids parameters with slots."""
        slots, self._slots = self._slots, None
        self._slots = jax.block_until_ready(self._compiled(slots, *placed))
