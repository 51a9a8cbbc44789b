"""OpenVINO GenAI with continuous batching and prefix caching. It reads GGUF files itself."""

from __future__ import annotations

import json
import sys

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    given = json.loads(sys.argv[1])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 4  # GB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = 512
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_seqs = 64
    options = {"INFERENCE_NUM_THREADS": given["threads"]}
    pipeline = openvino_genai.ContinuousBatchingPipeline(given["model"], scheduler, "CPU", options)
    print(json.dumps({"peer": {}}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = asked["output"]
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in asked["prompts"]]
        found = pipeline.generate(prompts, [config] * len(prompts))
        outputs = [len(answer.m_generation_ids[0]) for answer in found]
        print(json.dumps({"peer": {"outputs": outputs}}), flush=True)


if __name__ == "__main__":
    main()
