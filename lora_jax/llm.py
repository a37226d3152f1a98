"""Offline generation with the calls of vLLM's `LLM`."""

from __future__ import annotations

import dataclasses
import difflib
import threading
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from .cli_args import VLLM_ONLY
from .config import EngineArgs
from .engine import Engine
from .errors import ConfigError, RequestError
from .lora.adapter import LoadReport
from .request import (
    CompletionOutput,
    LoRARequest,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
    StepOutput,
    continuations,
)


def engine_args(model: str, **options: Any) -> EngineArgs:
    """EngineArgs from keyword arguments. Raises ConfigError for an unknown one, with a hint."""
    names = {f.name for f in dataclasses.fields(EngineArgs)}
    for name in options:
        if name in names:
            continue
        close = difflib.get_close_matches(name, names, 1)
        if name.replace("_", "-") in VLLM_ONLY:
            raise ConfigError(f"{name} is an option of vLLM that lora_jax does not have: leave it out")
        raise ConfigError(f"unknown option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    for name in ("lora_modules", "lora_target_modules"):
        if options.get(name) is not None:
            options[name] = tuple(options[name])
    return EngineArgs(model=model, **options)


class LLM:
    """A model with its adapters, ready to generate.

    Every method may be called from any thread; calls that generate run one after another.
    Options are the fields of `EngineArgs`. Raises: ConfigError, ModelLoadError, CapacityError, AdapterError.
    """

    def __init__(self, model: str, **options: Any):
        self.engine = Engine(engine_args(model, **options))
        self._running = threading.Lock()

    @property
    def step_table(self):
        """The dispatch table; `step_table.report()` lists its executables."""
        return self.engine.step_table

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends."""
        return SamplingParams(**self.engine.defaults.as_sampling_overrides())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs in the order of the prompts.

        prompts: strings or {"prompt_token_ids": [...]}. sampling_params, lora_request: one for all, or one each; None is
        `get_default_sampling_params()`, and the base.
        Raises: RequestError, AdapterNotFoundError, AdapterError before anything runs; a request that fails on the device
        raises its error once all others are done.
        """
        if not isinstance(prompts, str | dict | list | tuple):
            raise RequestError(f"prompts must be a prompt or a list of them, got {prompts!r}", param="prompts")
        many: list[Prompt] = [prompts] if isinstance(prompts, str | dict) else list(prompts)  # type: ignore[list-item]
        given = _one_each(sampling_params, SamplingParams, len(many), "sampling_params")
        params = [self.get_default_sampling_params() if p is None else p for p in given]
        loras = _one_each(lora_request, LoRARequest, len(many), "lora_request")
        requests = [self.engine.make_request(p, s, r) for p, s, r in zip(many, params, loras, strict=True)]
        return self._run([continuations(request) for request in requests], use_tqdm)

    def chat(
        self,
        messages: Sequence[dict] | Sequence[Sequence[dict]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several, through the model's chat template."""
        if self.engine.tokenizer is None:
            raise RequestError("this model has no tokenizer, so no chat template", param="messages")
        conversations: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self.engine.tokenizer
        prompts: list[Prompt] = [
            {"prompt_token_ids": tokenizer.apply_chat_template(list(c), add_generation_prompt=add_generation_prompt)}
            for c in conversations
        ]
        return self.generate(prompts, sampling_params, lora_request, use_tqdm)

    def load_lora(self, name: str, path: str, *, replace: bool = False) -> LoadReport:
        """Read, check and register a PEFT folder. See `Engine.load_lora`."""
        return self.engine.load_lora(name, path, replace=replace)

    def unload_lora(self, name: str) -> None:
        """Forget an adapter. Raises AdapterNotFoundError."""
        self.engine.unload_lora(name)

    def pin_lora(self, name: str) -> None:
        """Keep an adapter's device slot for it. See `Engine.pin_lora`."""
        self.engine.pin_lora(name)

    def unpin_lora(self, name: str) -> None:
        """End `pin_lora`. Raises AdapterNotFoundError."""
        self.engine.unpin_lora(name)

    def reset_prefix_cache(self) -> None:
        """Requests from now on share nothing with those before."""
        self.engine.reset_prefix_cache()

    def list_loras(self) -> list[LoadReport]:
        """Reports of the loaded adapters."""
        return self.engine.list_loras()

    def stats(self) -> dict[str, Any]:
        """See `Engine.stats`."""
        return self.engine.stats()

    def _run(self, prompts: list[list[Request]], use_tqdm: bool) -> list[RequestOutput]:
        """prompts: of each its continuations."""
        with self._running:  # one thread steps the engine
            return self._run_alone(prompts, use_tqdm)

    def _run_alone(self, prompts: list[list[Request]], use_tqdm: bool) -> list[RequestOutput]:
        requests = [request for those in prompts for request in those]
        results = [_empty(those) for those in prompts]
        outputs = {
            r.request_id: (result, r.index) for those, result in zip(prompts, results, strict=True) for r in those
        }
        errors: list[Exception] = []
        open_ids = set(outputs)
        try:
            for request in requests:
                self.engine.add_request(request)
            with tqdm(total=len(requests), desc="generating", unit="prompt", disable=not use_tqdm) as bar:
                while open_ids:
                    for out in self.engine.step():
                        if out.request_id not in open_ids:
                            continue
                        _extend(*outputs[out.request_id], out)
                        if out.error is not None:
                            errors.append(out.error)
                        if out.finished:
                            open_ids.remove(out.request_id)
                            bar.update()
            self.engine.drain()
        finally:  # an interrupt must not leave requests behind
            for request_id in open_ids:
                self.engine.abort(request_id)
        if errors:
            raise errors[0]
        for result in results:
            result.finished = True
        return results


def _one_each(value: Any, kind: type, count: int, name: str) -> list[Any]:
    if value is None or isinstance(value, kind):
        return [value] * count
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} must be a {kind.__name__} or a list of them, got {value!r}", param=name)
    values = list(value)
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} entries for {count} prompts", param=name)
    for v in values:
        if v is not None and not isinstance(v, kind):
            raise RequestError(f"{name} must hold {kind.__name__}, got {type(v).__name__}", param=name)
    return values


def _empty(those: list[Request]) -> RequestOutput:
    """those: the continuations of one prompt."""
    request, wants = those[0], those[0].params.logprobs is not None
    name = request.request_id if len(those) == 1 else request.request_id.partition("_")[2]
    completions = [CompletionOutput(r.index, "", [], [] if wants else None, 0.0 if wants else None) for r in those]
    return RequestOutput(name, request.prompt, request.prompt_token_ids, None, completions, False, request.lora_request)


def _extend(output: RequestOutput, index: int, step: StepOutput) -> None:
    completion = output.outputs[index]
    completion.text += step.text
    completion.token_ids += step.token_ids
    if step.prompt_logprobs is not None:
        output.prompt_logprobs = step.prompt_logprobs
    if step.logprobs is not None and completion.logprobs is not None:
        completion.logprobs += step.logprobs
        chosen = zip(step.logprobs, step.token_ids, strict=True)
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + sum(lp[t].logprob for lp, t in chosen)
    completion.finish_reason, completion.stop_reason = step.finish_reason, step.stop_reason
