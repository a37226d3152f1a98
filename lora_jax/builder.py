"""From options to a running device side: configuration, memory plan, weights, programs. Nothing is served before it is done."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from .compile_cache import one_warning, use_compilation_cache
from .config import CacheConfig, EngineArgs, LoRAConfig, SchedulerConfig
from .device import DeviceSetup, compiler_options, free_memory, set_up_device
from .dispatch import StepTable
from .errors import AdapterError, ConfigError, ModelLoadError
from .log import log
from .lora.adapter import Adapter, peek_rank, read_adapter
from .memory import MemoryPlan, Sizes, check_programs, plan_memory
from .models.checkpoint import Checkpoint, dummy_params, load_params
from .models.config import ModelConfig, load_config
from .models.generation import GenerationDefaults, load_generation_defaults
from .models.llama import hf_plan
from .models.resolve import resolve_model
from .models.shapes import SHAPES, known_shape
from .runtime import Runtime
from .spec import RuntimeSpec, build_table, fixed_bytes, make_spec
from .step import Params
from .tiles import TileTable, stored_tiles
from .tokenizer import Tokenizer

CPU_KV_LIMIT = 4 << 30  # bytes of KV pages taken on CPU without being asked for
DEFAULT_RANK = 16


@dataclass(frozen=True)
class Built:
    """What `build` gives the engine. params: the base weights, in the order of the spec's paths.
    base_tensor: the checkpoint's own tensor by name (None with dummy weights). adapters: those named at start."""

    args: EngineArgs
    params: Params
    runtime: Runtime
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    memory: MemoryPlan
    base_tensor: Callable[[str], np.ndarray] | None
    adapters: list[Adapter]


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. folder: None for a known shape."""

    folder: Any
    config: ModelConfig
    defaults: GenerationDefaults


def build(args: EngineArgs, weights: Built | None = None) -> Built:
    """weights: what another engine of this process was built to; its base weights are used and none are loaded, so the memory
    plan counts none. They must be the very weights that `args` describe.

    Raises: ConfigError, ModelLoadError, CapacityError, AdapterError.
    """
    with one_warning():
        return _build(args, weights)


def _build(args: EngineArgs, weights: Built | None) -> Built:
    source = find_model(args)
    setup = set_up_device(args.device, args.implementation, args.gpu_memory_utilization)
    dtype = _dtype(args, source.config, setup)
    tokenizer = _tokenizer(args, source)
    lora_config = _lora_config(args)
    if weights is not None:
        _check_shared(args, source.config, dtype, setup, weights)
    spec, plan = _plan(args, source, setup, dtype, lora_config, shared=weights is not None)
    checkpoint = None if args.load_format == "dummy" else Checkpoint.open(source.folder)
    base_tensor = _base_tensor(checkpoint)
    adapters = [read_for(spec, base_tensor, *_name_and_path(item)) for item in args.lora_modules]
    params = _load(args, source.config, spec, checkpoint) if weights is None else weights.params
    spec, table = _compile(args, spec, params)
    plan = check_programs(plan, table.temp_bytes())
    log.info("memory plan:\n%s\nmax_model_len=%d", plan, plan.max_model_len)
    text = tokenizer.token_text if tokenizer is not None else lambda token: None
    runtime = Runtime(spec, params, table, text)
    if setup.is_gpu:
        with _bar(args, "warming up", len(spec.keys)) as progress:
            runtime.warm_up(progress)
    return Built(args, params, runtime, tokenizer, source.defaults, plan, base_tensor, adapters)


def _check_shared(args: EngineArgs, config: ModelConfig, dtype: Any, setup: DeviceSetup, weights: Built) -> None:
    """Raises ConfigError naming what differs between the weights wanted and those there."""
    theirs, spec = weights.args, weights.runtime.spec
    same = {name: (getattr(args, name), getattr(theirs, name)) for name in ("model", "revision", "load_format")}
    if args.load_format == "dummy":
        same["seed"] = (args.seed, theirs.seed)  # of random weights
    same |= {"dtype": (str(dtype), str(jnp.dtype(spec.dtype))), "device": (setup.device, spec.setup.device)}
    for name, (ours, other) in same.items():
        if ours != other:
            raise ConfigError(f"weights: {name}={ours!s} is not that of the engine to share them with, {other!s}")
    if config != spec.model:
        raise ConfigError(f"weights: the configuration of {args.model} has changed since the other engine loaded it")


def read_for(spec: RuntimeSpec, base_tensor: Callable[[str], np.ndarray] | None, name: str, path: str) -> Adapter:
    """An adapter for this engine's model, slots and dtype. Raises AdapterError."""
    assert spec.lora is not None
    return read_adapter(
        path,
        name,
        spec.lora.targets,
        max_rank=spec.lora.config.max_lora_rank,
        tied_embeddings=spec.model.tie_word_embeddings,
        dtype=spec.dtype,
        base_tensor=base_tensor,
    )


def _name_and_path(item: str) -> tuple[str, str]:
    name, _, path = item.partition("=")
    if not name or not path:
        raise AdapterError(f"lora_modules must hold NAME=PATH, got {item!r}")
    return name, path


def find_model(args: EngineArgs) -> ModelSource:
    """The model that `args` name, without its weights. Raises: ConfigError, ModelLoadError."""
    if args.load_format == "dummy" and args.model in SHAPES:
        return ModelSource(None, known_shape(args.model), GenerationDefaults())
    if (
        not os.path.exists(args.model)
        and (args.load_format == "dummy" or args.model in SHAPES)
        and "/" not in args.model
    ):
        if args.model in SHAPES:
            raise ModelLoadError(f"{args.model!r} is a shape without weights: add load_format=dummy for random ones")
        raise ModelLoadError(f"load_format=dummy: {args.model!r} is neither a folder nor one of {', '.join(SHAPES)}")
    folder = resolve_model(args.model, args.revision, weights=args.load_format != "dummy")
    config, raw = load_config(folder)
    return ModelSource(folder, config, load_generation_defaults(folder, raw))


def _dtype(args: EngineArgs, config: ModelConfig, setup: DeviceSetup) -> Any:
    name = args.dtype
    if name == "auto":
        name = (config.dtype or "bfloat16") if setup.is_gpu else "float32"
        if name == "float32" and setup.is_gpu:
            name = "bfloat16"  # as vLLM: a float32 checkpoint is served in half precision unless dtype says otherwise
    return jnp.dtype(name)


def _tokenizer(args: EngineArgs, source: ModelSource) -> Tokenizer | None:
    if args.tokenizer is not None:
        return Tokenizer.load(args.tokenizer, args.revision)
    if source.folder is None:
        return None
    try:
        return Tokenizer.load(str(source.folder))
    except ModelLoadError as e:
        if args.load_format == "dummy":
            return None
        log.warning("no tokenizer (%s): only prompt_token_ids can be served", str(e).splitlines()[0])
        return None


def _lora_config(args: EngineArgs) -> LoRAConfig | None:
    if not args.enable_lora:
        return None
    rank = args.max_lora_rank
    if rank == "auto":
        paths = [_name_and_path(item)[1] for item in args.lora_modules]
        rank = max((peek_rank(p) for p in paths), default=DEFAULT_RANK)
    in_memory = max(args.max_cpu_loras or 4 * args.max_loras, len(args.lora_modules))
    return LoRAConfig(args.max_loras, rank, in_memory, args.lora_target_modules, args.max_total_lora_rank)


def _plan(
    args: EngineArgs, source: ModelSource, setup: DeviceSetup, dtype: Any, lora: LoRAConfig | None, *, shared: bool
) -> tuple[RuntimeSpec, MemoryPlan]:
    """Sizes first, with a cache of one page, then the cache that fits. shared: the weights are there already."""
    model = source.config
    cache = use_compilation_cache(args.compilation_cache_dir)
    tiles = stored_tiles(cache, setup)

    def spec_for(num_pages: int, max_model_len: int) -> RuntimeSpec:
        return _spec(args, model, setup, dtype, lora, cache, tiles, num_pages, max_model_len)

    positions = model.max_position_embeddings
    if args.max_model_len and args.max_model_len > positions:
        raise ConfigError(f"max_model_len={args.max_model_len} exceeds the model's max_position_embeddings={positions}")
    draft = spec_for(2, args.max_model_len or positions)
    shapes = [jax.ShapeDtypeStruct(hf.shape, dtype) for hf in hf_plan(model).values()]
    weights, slots, state = fixed_bytes(draft, shapes)
    page = args.page_size * model.num_layers * 2 * model.num_kv_heads * model.head_dim * dtype.itemsize
    sizes = Sizes(0 if shared else weights, slots, state, _estimate_programs(draft), page)
    plan = plan_memory(
        sizes,
        limit=free_memory(setup, args.gpu_memory_utilization),
        page_size=args.page_size,
        max_num_seqs=draft.builder.scheduler.max_num_seqs,
        model_positions=positions,
        max_model_len=args.max_model_len,
        num_pages=args.num_pages,
        kv_limit=None if setup.is_gpu else CPU_KV_LIMIT,
    )
    return spec_for(plan.num_pages, plan.max_model_len), plan


def _spec(
    args: EngineArgs,
    model: ModelConfig,
    setup: DeviceSetup,
    dtype: Any,
    lora: LoRAConfig | None,
    cache: str | None,
    tiles: TileTable,
    num_pages: int,
    max_model_len: int,
) -> RuntimeSpec:
    seqs = args.max_num_seqs or (64 if setup.is_gpu else 8)
    budget = args.max_num_batched_tokens or (2048 if setup.is_gpu else 512)
    return make_spec(
        model,
        dtype,
        setup,
        SchedulerConfig(
            seqs,
            min(budget, max_model_len * seqs),
            max_model_len,
            args.specialize_lora,
            token_bucket_growth=2 if setup.is_gpu else 4,  # a GPU's programs compile sooner and save more
            enable_prefix_caching=args.enable_prefix_caching,
        ),
        CacheConfig(args.page_size, num_pages),
        lora,
        max_logprobs=args.max_logprobs,
        seed=args.seed,
        compiler_options=compiler_options(setup, args.enable_command_buffers, cache),
        tiles=tiles,
    )


def one_layer_spec(args: EngineArgs, setup: DeviceSetup, cache: str | None, tiles: TileTable) -> RuntimeSpec:
    """Of the first layer of the model that `args` name, with the engine's sizes and without a plan of its memory.
    Raises: ConfigError, ModelLoadError, AdapterError."""
    model = find_model(args).config
    model = dataclasses.replace(model, num_layers=1, layer_windows=model.layer_windows[:1])
    dtype, lora = _dtype(args, model, setup), _lora_config(args)
    length = args.max_model_len or model.max_position_embeddings
    return _spec(args, model, setup, dtype, lora, cache, tiles, 2, length)


def _estimate_programs(spec: RuntimeSpec) -> int:
    """Temporaries of the largest step, from above: activations and attention scores of a full prefill, its adapters, and
    sampling."""
    model, scheduler = spec.model, spec.builder.scheduler
    tokens, item = scheduler.token_buckets[-1], jnp.dtype(spec.dtype).itemsize
    width = 6 * model.hidden_size + 3 * model.intermediate_size + 3 * model.num_heads * model.head_dim
    scores = 3 * 4 * model.num_heads * 256 + 3 * 4 * model.num_heads * model.head_dim
    prefill = tokens * (width * item + scores)
    if spec.lora is not None:
        prefill += spec.lora.slot_ranks().scratch_bytes(tokens, scheduler.max_prefill_seqs)
    gathered = 2 * 256 * 2 * model.num_kv_heads * model.head_dim * item
    sampling = scheduler.row_buckets[-1] * (model.vocab_size * 4 * 6 + gathered)
    return max(prefill, sampling)


def _load(args: EngineArgs, model: ModelConfig, spec: RuntimeSpec, checkpoint: Checkpoint | None):
    sharding = spec.setup.sharding
    if checkpoint is None:
        arrays = dummy_params(hf_plan(model), dtype=spec.dtype, sharding=sharding, seed=args.seed)
    else:
        progress = not args.disable_tqdm
        arrays = load_params(checkpoint, hf_plan(model), dtype=spec.dtype, sharding=sharding, progress=progress)
    assert set(arrays) == set(spec.definition.paths), set(arrays) ^ set(spec.definition.paths)
    return tuple(arrays[path] for path in spec.definition.paths)


def _compile(args: EngineArgs, spec: RuntimeSpec, params: Any) -> tuple[RuntimeSpec, StepTable]:
    """The table, and the spec it was made from: without measured tiles where steps do not compile with them. Plain steps give them
    up for their own sake alone, so that they stay those of an engine without LoRA."""
    fewer = [dict(lora_tiles=TileTable())] if spec.lora else []
    for changes in [*fewer, dict(tiles=TileTable(), lora_tiles=TileTable())] if spec.tiles.entries else ():
        try:
            return spec, _compile_all(args, spec, params)
        except Exception as e:
            log.warning("tiles: not every step compiles with the measured ones, trying fewer of them: %s", str(e)[:500])
        spec = dataclasses.replace(spec, **changes)
    return spec, _compile_all(args, spec, params)


def _compile_all(args: EngineArgs, spec: RuntimeSpec, params: Any) -> StepTable:
    with _bar(args, "compiling steps", len(spec.keys)) as progress:
        return build_table(spec, params, threads=max(2, os.cpu_count() or 2), progress=progress)


@contextlib.contextmanager
def _bar(args: EngineArgs, what: str, total: int) -> Iterator[Callable[[Any], None]]:
    with tqdm(total=total, desc=what, unit="step", disable=args.disable_tqdm) as bar:

        def progress(key: Any) -> None:
            bar.set_postfix_str(str(key), refresh=False)
            bar.update()

        yield progress


def _base_tensor(checkpoint: Checkpoint | None) -> Callable[[str], np.ndarray] | None:
    if checkpoint is None:
        return None
    tensors = checkpoint.tensors

    def read(name: str) -> np.ndarray:
        if name == "lm_head.weight" and name not in tensors:  # tied
            name = "model.embed_tokens.weight"
        return tensors[name]

    return read
