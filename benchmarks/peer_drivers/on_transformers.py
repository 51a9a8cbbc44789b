"""transformers' continuous batching (`generate_batch`), with dequantised weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

CACHED_TOKENS = 65_536
"""Tokens in the KV cache. The default, 90% of the free memory, would leave the other engines none."""


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    file = Path(given["model"])
    has_bf16 = torch.cpu._is_avx512_bf16_supported()
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent),
        gguf_file=file.name,
        dtype=torch.bfloat16 if has_bf16 else torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        attn_implementation="sdpa",
    ).eval()
    print(json.dumps({"peer": {}}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        config = GenerationConfig(
            max_new_tokens=asked["output"], do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batching = ContinuousBatchingConfig(num_blocks=CACHED_TOKENS // 256, max_batch_tokens=512)
        found = model.generate_batch(
            inputs=asked["prompts"],
            generation_config=config,
            continuous_batching_config=batching,
            progress_bar=False,
        )
        outputs = [len(found[key].generated_tokens) for key in found]
        print(json.dumps({"peer": {"outputs": outputs}}), flush=True)


if __name__ == "__main__":
    main()
