"""What decides the programs, and the list of what to compile for each key. Shapes only: nothing is allocated here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .batch import BatchBuilder
from .config import CacheConfig, LoRAConfig, SchedulerConfig
from .device import DeviceSetup
from .dispatch import Entry, StepTable
from .errors import ConfigError
from .kv_cache import kv_shape
from .lora.active import ItemBuckets, SlotRanks
from .lora.adapter import TargetSpec
from .lora.apply import attach
from .lora.sites import GroupShape, LoRASite, group_shapes, target_specs
from .lora.slots import SlotManager
from .lora.staging import ROOM as STAGED
from .lora.weights import place_avals, stack_avals, write_place
from .models.config import ModelConfig
from .models.llama import abstract_model, lora_sites
from .sampling import (
    init_last_tokens,
    init_state,
    reset_row,
    sample_full,
    sample_logprobs,
    state_avals,
)
from .sampling_inputs import RowSettings
from .step import ModelDef, lora_steps, plain_steps
from .step_keys import StepKey, step_keys
from .tiles import TileTable, traced_with


@dataclass(frozen=True)
class LoRARuntime:
    """What serving adapters adds: limits, the module definition with adapters, where each target's weights go."""

    config: LoRAConfig
    dtype: Any
    definition: ModelDef
    groups: dict[str, GroupShape]
    targets: dict[str, TargetSpec]

    def slot_manager(self) -> SlotManager:
        config, places = self.config, {}
        if config.places_of_slot > 1:
            places = dict(num_places=config.num_places, place_rank=config.place_rank, most=config.places_of_slot)
        return SlotManager(config.max_loras, config.max_cpu_loras, **places)

    def slot_ranks(self) -> SlotRanks:
        """For a runtime of its own."""
        return SlotRanks(self.groups, self.config, jnp.dtype(self.dtype).itemsize)


@dataclass(frozen=True)
class RuntimeSpec:
    """All that decides the programs. tiles: the measured ones, of the plain steps; lora_tiles: of the steps with adapters."""

    setup: DeviceSetup
    model: ModelConfig
    dtype: Any
    definition: ModelDef
    builder: BatchBuilder
    lora: LoRARuntime | None
    max_logprobs: int
    seed: int
    compiler_options: dict[str, object]
    tiles: TileTable = field(default_factory=TileTable)
    lora_tiles: TileTable = field(default_factory=TileTable)

    @property
    def keys(self) -> list[StepKey]:
        smaller = {} if self.item_buckets is None else {"smaller": self.item_buckets.smaller}
        return step_keys(self.builder.scheduler, self.lora is not None, **smaller)

    @property
    def item_buckets(self) -> ItemBuckets | None:
        return None if self.lora is None else ItemBuckets(self.lora.config, self.setup.implementation)

    def row_settings(self) -> RowSettings:
        """For a runtime of its own."""
        return RowSettings(self.builder.scheduler.max_num_seqs, self.model.vocab_size, self.seed)


def make_spec(
    model: ModelConfig,
    dtype: Any,
    setup: DeviceSetup,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    lora: LoRAConfig | None,
    *,
    max_logprobs: int = 20,
    seed: int = 0,
    compiler_options: dict[str, object] | None = None,
    tiles: TileTable | None = None,
) -> RuntimeSpec:
    """Raises ConfigError when lora.target_modules names a module that the model does not have."""
    plain = ModelDef.of(abstract_model(model, dtype))
    return RuntimeSpec(
        setup,
        model,
        dtype,
        plain,
        BatchBuilder(scheduler, cache),
        None if lora is None else _lora_runtime(model, dtype, setup.implementation, lora, plain),
        max_logprobs,
        seed,
        compiler_options or {},
        *(tiles or TileTable(),) * 2,
    )


def _lora_runtime(
    model: ModelConfig, dtype: Any, implementation: str, lora: LoRAConfig, plain: ModelDef
) -> LoRARuntime:
    wanted = lambda name: lora.target_modules is None or name.rsplit(".", 1)[-1] in lora.target_modules  # noqa: E731
    sites = lora_sites(model)
    _check_targets(lora, sites)
    sites = [site for site in sites if any(map(wanted, site.names))]
    groups, tree = group_shapes(sites), abstract_model(model, dtype)
    attach(tree, sites, groups, stack_avals(groups, lora, dtype, None), implementation=implementation)
    definition = ModelDef.of(tree)
    assert definition.paths == plain.paths, "attaching changed the model's own parameters"
    targets = {name: target for name, target in target_specs(sites).items() if wanted(name)}
    return LoRARuntime(lora, dtype, definition, groups, targets)


def _check_targets(lora: LoRAConfig, sites: list[LoRASite]) -> None:
    last = {name.rsplit(".", 1)[-1] for site in sites for name in site.names}
    unknown = set(lora.target_modules or ()) - last
    if unknown:
        raise ConfigError(f"lora_target_modules: {', '.join(sorted(unknown))} is none of {', '.join(sorted(last))}")


def _init(spec: RuntimeSpec):
    builder, model = spec.builder, spec.model
    shape = kv_shape(builder.cache, model.num_kv_heads, model.head_dim)
    pages = tuple(jnp.zeros(shape, spec.dtype) for _ in range(model.num_layers))
    seqs = builder.scheduler.max_num_seqs
    return pages, init_state(seqs, model.vocab_size), init_last_tokens(seqs)


def _lora_stacks(spec: RuntimeSpec) -> dict:
    assert spec.lora is not None
    return stack_avals(spec.lora.groups, spec.lora.config, spec.dtype, spec.setup.sharding)


def _placed(spec: RuntimeSpec, tree: Any) -> Any:
    """Shapes of a tree of arrays, on the engine's mesh."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spec.setup.sharding), tree)


def _adapter_args(spec: RuntimeSpec, key: StepKey) -> tuple[Any, ...]:
    """Shapes of what a step with adapters is given last."""
    assert spec.lora is not None
    slot_ids = spec.builder.slot_ids((), key.bucket)
    if key.phase == "prompt_logprobs":
        return (_placed(spec, slot_ids),)
    items = spec.lora.slot_ranks().items(slot_ids, spec.builder.most_requests(key), key.items)
    return _placed(spec, (slot_ids, slot_ids, items))


def _wave(spec: RuntimeSpec, key: StepKey) -> int:
    """Programs that hold an equal product or fusion compile one after another: on a GPU the first one's autotuning result
    is then the one of all, and not, where two threads tune at once, sometimes the one and sometimes the other. Plain steps
    come before LoRA steps, those before the ones of few items; every prefill shares its head with the decode step of as many
    rows, prompt_logprobs theirs; sampling shares the greedy choice with the decode step of its rows, and logprobs all that full
    holds."""
    first = spec.builder.scheduler.token_buckets[0]
    later = {"prefill": 1, "prompt_logprobs": 1 + (key.bucket > first), "sample": 1 + (key.mode == "logprobs")}
    return 3 * (key.lora + (key.items > 0)) + later.get(key.phase, 0)


def step_entries(spec: RuntimeSpec, params: Any) -> dict[StepKey, Entry]:
    """What to compile for each key. params: arrays or shapes, in the order of spec.definition.paths."""
    builder, model = spec.builder, spec.model
    placed = functools.partial(_placed, spec)
    params = placed(params)
    kv, state, last_tokens = placed(jax.eval_shape(functools.partial(_init, spec)))
    vocab, table, settings = model.vocab_size, builder.table(), spec.row_settings()
    plain = plain_steps(spec.definition, spec.max_logprobs, spec.setup.implementation)
    adapters = lora_steps(spec.lora.definition, spec.max_logprobs, spec.setup.implementation) if spec.lora else {}
    stacks: tuple[Any, ...] = (_lora_stacks(spec),) if spec.lora else ()
    array = lambda shape, dtype: placed(jax.ShapeDtypeStruct(shape, dtype))  # noqa: E731

    def model_entry(key: StepKey) -> Entry:
        fn = (adapters if key.lora else plain)[key.phase]
        head = (params, *(stacks if key.lora else ()))
        args: tuple[Any, ...]
        tail = _adapter_args(spec, key) if key.lora else ()
        donate: tuple[int, ...] = (len(head), len(head) + 1)  # pages and last tokens
        if key.phase == "prompt_logprobs":
            args = (array((key.bucket, model.hidden_size), spec.dtype), placed(builder.targets((), key.bucket)))
            donate = ()
        elif key.phase == "decode":
            args = (kv, last_tokens, placed(builder.decode((), key.bucket, table)))
        else:
            args = (kv, last_tokens, *placed(builder.prefill((), key.bucket)))
        return Entry(fn, (*head, *args, *tail), donate, spec.compiler_options, wave=_wave(spec, key))

    def sample_entry(key: StepKey) -> Entry:
        logits = array((key.bucket, vocab), spec.dtype)
        rows = builder.rows((), key.bucket)
        args = (logits, last_tokens, placed(rows), state, placed(settings.arrays(rows, np.zeros_like(rows))))
        with_logprobs = functools.partial(sample_logprobs, max_logprobs=spec.max_logprobs)
        fn = with_logprobs if key.mode == "logprobs" else sample_full
        return Entry(fn, args, (1, 3), spec.compiler_options, wave=_wave(spec, key))

    def state_entry(key: StepKey) -> Entry:
        if key.phase == "sampling_state":
            ids = array((builder.scheduler.max_model_len,), jnp.int32)
            return Entry(reset_row, (state, array((), jnp.int32), ids, ids), (0,))
        if key.phase == "init":
            return Entry(functools.partial(_init, spec), ())
        if key.phase == "init_slots":
            return Entry(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), stacks[0]), ())
        return Entry(write_place, (stacks[0], array((3,), jnp.int32), place_avals(stacks[0], array)), (0,))

    kinds: dict[str, Callable[[StepKey], Entry]] = {
        "decode": model_entry,
        "prefill": model_entry,
        "prompt_logprobs": model_entry,
        "sample": sample_entry,
    }

    def tiled(key: StepKey) -> Entry:
        entry = kinds.get(key.phase, state_entry)(key)
        return dataclasses.replace(entry, fn=traced_with(entry.fn, spec.lora_tiles if key.lora else spec.tiles))

    return {key: tiled(key) for key in spec.keys}


def build_table(spec: RuntimeSpec, params: Any, *, threads: int, progress: Callable[[Any], None]) -> StepTable:
    """Compile every key. Float32 products are exact float32 ("highest"), not TF32."""
    precision = "highest" if jnp.dtype(spec.dtype) == jnp.float32 else None
    return StepTable.build(
        step_entries(spec, params), mesh=spec.setup.mesh, matmul_precision=precision, threads=threads, progress=progress
    )


def fixed_bytes(spec: RuntimeSpec, params: Any) -> tuple[int, int, int]:
    """Bytes of weights, LoRA slots with the adapters on their way to them, and sampling state."""
    size = lambda tree: sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    state = state_avals(spec.builder.scheduler.max_num_seqs, spec.model.vocab_size)
    return size(params), size(_lora_stacks(spec)) + size(_staged(spec)) if spec.lora else 0, size(state)


def _staged(spec: RuntimeSpec) -> list[Any]:
    """Shapes of what lies on the device before slots are written."""
    assert spec.lora is not None
    places = STAGED * spec.lora.config.places_of_slot
    return [place_avals(_lora_stacks(spec), jax.ShapeDtypeStruct)] * places
