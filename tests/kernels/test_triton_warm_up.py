"""Warm-up compiles every specialisation that a step can launch."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from ramify.kernels.arguments.sampling_inputs import TokenCounts
from ramify.kernels.registry import ops
from ramify.kernels.triton.float8 import float8_matmul
from ramify.kernels.triton.matmul import matmul
from ramify.kernels.triton.sampling import sample_tokens
from ramify.kernels.weights.quantised import lay_out
from ramify.kernels.weights.rows import Rows
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.executor.runner import Runner
from ramify.runtime.executor.sampler import SamplingBatch, SamplingRow
from ramify.runtime.model.layers import Linear
from ramify.runtime.model.loading.load import dummy_model
from ramify.runtime.model.quantization import packing
from ramify.runtime.model.shape.hf_config import config_from_hf
from ramify.sampling_params import SamplingParams
from tests.kernels import sampling_cases
from tests.kernels.kernel_compiler import Compiled, compiling

pytestmark = pytest.mark.slow

PAGE = 16
BRANCHES = 70
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 5000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
MOST_FORMS = 38
"""Most forms of a warm-up, four of them for quantised weights. A start waits for each: 8 s of processor time
for the slowest."""
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, min_p=0.1),
    SamplingParams(temperature=1.0, top_p=0.5, frequency_penalty=1.0),
    SamplingParams(temperature=1.0, top_k=3, logit_bias={1: 2.0}),
)


def steps(runner: Runner) -> None:
    """Prefills of all tiles, with and without parts; decodes alone, over one prefix, and padded."""
    ids = np.zeros(4000, np.int32)
    pages = list(range(200))

    def run(spans: list[tuple[int, int]], copies: tuple[tuple[int, int], ...] = ()) -> None:
        extensions = [Extension(ids, start, stop, pages) for start, stop in spans]
        hidden = runner.forward(pack(extensions, PAGE, copies))
        runner.logits(hidden[:1])
        runner.logits(hidden)

    for spans in ([(0, 1)], [(0, 20)], [(1000, 1009)], [(0, 100)], [(0, 3), (2900, 2901), (500, 700)]):
        run(spans)
    run([(30, 31)] * 3, ((5, 6), (7, 8), (9, 10)))
    run([(1800, 1801)] * BRANCHES)


def draws(runner: Runner, rows: int) -> None:
    logits = torch.zeros(rows, runner.model.config.vocab_size, dtype=runner.pool.k.dtype)
    mask = np.full(-(-logits.shape[1] // 32), -1, np.int32)
    counts = TokenCounts.from_ids(np.arange(9, dtype=np.int32), 4)
    for params in PARAMS:
        for masks in ([None], [mask], [mask, None]):
            given = [SamplingRow(params, 0.5, counts, masks[row % len(masks)]) for row in range(rows)]
            for asked, top in (([], 0), ([0], 0), (list(range(rows)), 7)):
                runner.sampler.begin_draw(logits, SamplingBatch.of(given), asked, top)
    runner.sampler.log_probabilities(logits, np.zeros(rows, np.int64), 3)


def forms(launches: list[Compiled]) -> set[tuple[str, str]]:
    return {(launch.name, launch.key) for launch in launches}


@pytest.mark.parametrize(("deterministic", "rounded"), [(False, False), (True, False), (False, True)])
def test_nothing_is_compiled_after_the_warm_up(deterministic: bool, rounded: bool) -> None:
    model = dummy_model(config_from_hf(SHAPE), dtype=torch.bfloat16)
    if rounded:
        form = packing("int4", torch.bfloat16)
        for module in model.modules():
            if isinstance(module, Linear):
                module.lay_out(form, "cpu")
    with compiling(90, noting=True) as launches:
        kernels = ops("triton", deterministic=deterministic)
        pool = KvPool(model.config, num_pages=300, page_size=PAGE, dtype=torch.bfloat16)
        runner = Runner(model, pool, kernels)
        runner.warm_up()
        known = forms(launches)
        runner.capture_graphs([1, 2, 3, 4], max_pages=250)
        launches.clear()
        steps(runner)
        for rows in (1, 2, 5):
            draws(runner, rows)
    names = {name for name, _ in known}
    assert {"attend", "_merge", "_rope_store", "_copy", "_sample", "collect", "_finish", "_edit"} <= names
    assert deterministic == ("_product" in names)
    assert rounded == ("_quantised_product" in names)
    assert len(known) <= MOST_FORMS
    assert all("'enable_fp_fusion': False" in key for _, key in known), "nothing is fused behind our back"
    assert forms(launches), "steps launch kernels"
    assert not forms(launches) - known, "a request would wait for these"
    idle = {name for name, _ in known - forms(launches)}
    assert idle <= {"attend", "_merge"}, "compiled for nothing"


def test_draws_have_a_few_forms_for_all_vocabularies() -> None:
    """There are two forms by alignment, two by mask, two by dtype, and one of float16; GPU tests compile
    all."""
    more = [(vocab, "some", torch.bfloat16) for vocab in (32000, 50257, 151936, 201088, 262208, 400000)]
    options = sampling_cases.options([sampling_cases.Row(top_k=5)], [0.5], "cpu")
    with compiling(90, noting=True) as launches:
        for vocab, masked, dtype in [*sampling_cases.DRAWS, *more]:
            logits = torch.zeros(1, vocab + 48, dtype=dtype)[:, :vocab]
            sample_tokens(logits, options, *sampling_cases.masks_of(1, vocab, "cpu", masked))
    counts = collections.Counter(name for name, _ in forms(launches))
    assert counts == {"_sample": 9, "scan": 9, "collect": 9, "threshold": 4}


def test_products_of_all_widths_have_the_same_forms() -> None:
    """One form is for many rows and one for few: the number of parts and the width of float8's are no
    constants."""
    widths = 2048, 4096, 14336
    with compiling(90, noting=True) as launches:
        for width in widths:
            numbers = torch.zeros(256, width, dtype=torch.uint8).view(torch.float8_e4m3fn)
            rows = Rows(numbers, torch.ones(256, 1), group=0, float8_activations=True)
            weight = lay_out(rows, inputs=width, device="cpu")
            assert weight is not None
            for count in (3, 300):
                x = torch.zeros(count, width, dtype=torch.bfloat16)
                matmul(x, torch.zeros(256, width, dtype=torch.bfloat16))
                float8_matmul(x, weight)
    counts = collections.Counter(name for name, _ in forms(launches))
    assert (counts["_product"], counts["_float8_product"], counts["_gather"]) == (2, 2, len(widths))
