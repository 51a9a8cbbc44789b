"""The logits of OpenVINO GenAI's model of a GGUF file for given tokens, computed as in its pipeline for one
sequence.

They are written to a file: (tokens, vocabulary) float32 numbers.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    given = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(given["model"], folder)
        openvino_genai.LLMPipeline(copy, "CPU", enable_save_ov_model=True)
        found = next(path for path in Path(folder).rglob("openvino_model.xml"))
        model = openvino.Core().compile_model(str(found), "CPU", {"INFERENCE_NUM_THREADS": given["threads"]})
        request = model.create_infer_request()
        ids, chunk, rows = given["ids"], given["chunk"], []
        for start in range(0, len(ids), chunk):
            part = np.array([ids[start : start + chunk]], dtype=np.int64)
            stop = start + part.shape[1]
            inputs = {
                "input_ids": part,
                "attention_mask": np.ones((1, stop), dtype=np.int64),
                "position_ids": np.arange(start, stop, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
            rows.append(np.array(request.infer(inputs)["logits"][0], dtype=np.float32))
    np.concatenate(rows).tofile(given["out"])


if __name__ == "__main__":
    main()
