"""A model of transformers with its weights: the library's code, our attention on KV pages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from ramify.kernels.registry import Ops
from ramify.runtime.model.causal_lm import Attend, CausalLM
from ramify.runtime.model.shape.config import ModelShape
from ramify.runtime.model.transformers.hooks import calling
from ramify.runtime.model.transformers.trace import Head, Mask, TracedShape, implementations, missing_tensors

EXPERTS = "grouped_mm"
"""transformers' name for the way to multiply experts: one product for the tokens of each expert."""


class TransformersModel(CausalLM):
    """Runs `model`, a …ForCausalLM of the library, whose shape is `config`."""

    config: TracedShape

    def __init__(self, config: TracedShape, model: Any) -> None:
        super().__init__(config)
        self.body = model.get_submodule(config.body)
        self._head = Head(model, config.body, config.output)
        # `Head` has taken the body out of `model`. It is no nn.Module, so that nothing is registered twice.

    def use_kernels(self, ops: Ops) -> None:
        """Ignore `ops`: the library's code computes all but attention, which the executor passes in."""

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, hidden: Tensor | None = None) -> Tensor:
        ids, positions = ids[None], positions[None]
        mask = torch.ones_like(ids, dtype=torch.bool)
        tensors = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
        inputs = self.config.body_inputs.items()
        given = {key: tensors[value] if isinstance(value, str) else value for key, value in inputs}
        with calling(_Pass(self.config, attend, ids.shape[1], ids.device)):
            states: Tensor = self.body(**given)[0]
        return states[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


class _Pass:
    """The hooks of one forward pass: the n-th call of attention reads and writes layer n of the pages."""

    def __init__(self, config: TracedShape, attend: Attend, tokens: int, device: torch.device) -> None:
        self._config, self._attend, self._layer = config, attend, 0
        self._group = config.num_heads // config.num_kv_heads
        # The library has rotated the keys: rotations by 1 change no bit.
        self._still = torch.ones((tokens, config.head_dim // 2), dtype=torch.complex64, device=device)

    def mask(self, visible: Callable[..., Any], window: int | None, plain: bool) -> Mask:
        return Mask(window)

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, options: Any
    ) -> Tensor:
        layer, config = self._layer, self._config
        self._layer += 1
        call = config.calls[layer]
        if call.scale != config.score_scale:
            q = q * (call.scale / config.score_scale)
        q, k, v = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)  # (T, heads, dim)
        repeats = call.heads // call.kv_heads // self._group
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        q = self._fitted(q, config.num_heads)
        k, v = self._fitted(k, config.num_kv_heads), self._fitted(v, config.num_kv_heads)
        sinks: Tensor | None = options.get("s_aux")
        if sinks is not None:
            sinks = F.pad(sinks.float(), (0, config.num_heads - call.heads))
        out = self._attend(layer, q, k, v, self._still, window=call.window, sinks=sinks)
        return out[None, :, : call.heads, : call.value_dim]

    def _fitted(self, x: Tensor, heads: int) -> Tensor:
        """`x`, (T, heads, dim), padded with zeros to `heads` heads of the pages' head size; contiguous."""
        missing, narrow = heads - x.shape[1], self._config.head_dim - x.shape[2]
        if missing or narrow:
            return F.pad(x, (0, narrow, 0, missing))
        # torch calls one token of one head contiguous whatever its strides; the kernels compare strides.
        return x.contiguous().view(-1).view(x.shape)


def load_transformers(
    folder: Path, config: ModelShape, *, dtype: torch.dtype, device: torch.device | str
) -> TransformersModel:
    """The checkpoint in `folder`, its weights converted to `dtype`.

    Raises `InvalidRequest` for a checkpoint that does not fit the model.
    """
    assert isinstance(config, TracedShape)
    options: dict[str, Any] = implementations(config.architecture, EXPERTS)
    bars = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        model, report = config.architecture.from_pretrained(
            folder,
            config=copy.deepcopy(config.config),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, as missing tensors are
            **options,
        )
    finally:
        if bars:
            enable_progress_bar()
    error = missing_tensors(config.architecture, report)
    if error is not None:
        raise error
    return TransformersModel(config, model.to(device).eval())


def dummy_transformers(
    config: ModelShape, *, dtype: torch.dtype, device: torch.device | str, seed: int
) -> TransformersModel:
    """The model with the random weights that the library starts training from."""
    assert isinstance(config, TracedShape)
    options: dict[str, Any] = implementations(config.architecture, EXPERTS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = config.architecture._from_config(copy.deepcopy(config.config), dtype=dtype, **options)
    return TransformersModel(config, model.to(device).eval())
