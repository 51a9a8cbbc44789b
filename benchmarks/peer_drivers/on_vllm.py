"""vLLM on the CPU with prefix caching. transformers first dequantises the weights into a folder."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path


def main() -> None:
    given = json.loads(sys.argv[1])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from vllm import LLM, SamplingParams

    file = Path(given["model"])
    dtype = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)
        del model
        engine = LLM(
            folder,
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=given["context"],
            max_num_seqs=given["requests"],
            enable_prefix_caching=True,
        )
        print(json.dumps({"peer": {}}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            options = SamplingParams(temperature=0.0, max_tokens=asked["output"], ignore_eos=True)
            prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
            found = engine.generate(prompts, options, use_tqdm=False)
            outputs = [len(answer.outputs[0].token_ids) for answer in found]
            print(json.dumps({"peer": {"outputs": outputs}}), flush=True)


if __name__ == "__main__":
    main()
