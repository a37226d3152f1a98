"""A process of its own that starts an engine and tells what its programs are: python engine_process.py MODEL plain|lora [CACHE]."""

from __future__ import annotations

import json
import sys

from lora_jax import LLM, SamplingParams

if __name__ == "__main__":
    model, lora = sys.argv[1], sys.argv[2] == "lora"
    llm = LLM(
        model,
        enable_lora=lora,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=64,
        num_pages=9,
        disable_tqdm=True,
        compilation_cache_dir=sys.argv[3] if len(sys.argv) > 3 else "",
    )
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=20, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": list(range(3, 40))}], params, use_tqdm=False
    )
    logprobs = [[{t: v.logprob.hex() for t, v in e.items()} for e in o.outputs[0].logprobs or []] for o in outputs]
    hashes = {row["key"]: row["program_hash"] for row in llm.step_table.report()}
    print(json.dumps({"hashes": hashes, "logprobs": logprobs, "stats": llm.stats()}))
