"""Attention by FlashInfer: a plan on the host once a step, and a run for each layer.

Example with pages of 4, two sequences of 6 and 9 tokens, of which 1 and 3 are new:

    page table    7 2 -        page indptr   0 2 5       pages of the sequences, one after the other
                  5 1 8        page indices  7 2 5 1 8
    kv lengths    6 9          last lengths  2 1         tokens in the last page of each
                               token indptr  0 1 4       not all have one new token: the prefill wrapper

A step in which every sequence has one new token is planned and run by `BatchDecodeWithPagedKVCacheWrapper`,
any other by `BatchPrefillWithPagedKVCacheWrapper`. Our pages are FlashInfer's layout HND. Written from the
sources of 0.6.18 and 0.7.2 (`flashinfer/prefill.py`, `decode.py`).
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.kernels.machine.errors import KernelUnavailable
from ramify.kernels.machine.transfers import to_device

HEAD_DIMS = (64, 128, 256)
"""The head_dims that both the prefill and the decode kernels of FlashInfer support."""
WORKSPACE = 384 << 20
"""Bytes of the workspace in which FlashInfer's kernels keep partial results of split sequences; SGLang's
default."""
OWN_BYTES = 2 * ((8 << 20) + (4 << 15))
"""Bytes that FlashInfer's two wrappers allocate themselves: an integer workspace and lengths of 32,768
sequences."""
TENSOR_CORES_FROM = 4
"""The query heads of a KV head from which decodes use tensor cores: vLLM's threshold. FlashInfer's other
decode kernel does not support 5, 7 or more than 8 query heads of a KV head."""

_workspaces: weakref.WeakValueDictionary[torch.device, Tensor] = weakref.WeakValueDictionary()
"""The workspace of each device. Wrappers run one after the other, so they share a workspace."""


def library() -> Any:
    """The module `flashinfer`. Raises `KernelUnavailable` where it cannot be imported."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise KernelUnavailable(f"flashinfer cannot be imported: {error}.") from error


class FlashInferPlanner:
    """A planner of attention for layers with the same window. Each plan replaces the previous plan.

    Parameters
    ----------
    heads, kv_heads, head_dim, dtype, page_size : of the model and its pages
    window : positions each query sees, its own included; 0 for all
    scale, soft_cap : of scores, as in `kernels.reference.attention.paged_attention`
    device : of the pages
    """

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        page_size: int,
        window: int,
        scale: float,
        soft_cap: float,
        device: torch.device,
    ) -> None:
        flashinfer = library()
        self._workspace = _workspaces.get(device)
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
            _workspaces[device] = self._workspace
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=heads >= TENSOR_CORES_FROM * kv_heads
        )
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        self._shape = (heads, kv_heads, head_dim, page_size)
        self._dtype = dtype
        self._options = {
            "sm_scale": scale,
            "window_left": window - 1 if window else -1,  # FlashInfer does not count the query's own position
            "logits_soft_cap": soft_cap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        self._device = device
        self._planned: Any = None
        self._copied: dict[Any, torch.cuda.Event] = {}

    def plan(
        self,
        page_table: NDArray[np.int32],
        query_starts: Sequence[int] | NDArray[np.int32],
        kv_lens: Sequence[int] | NDArray[np.int32],
    ) -> None:
        """Plan a batch from its lengths on the host: `run` computes its layers from now on.

        page_table : (B, max_pages) int32
        query_starts, kv_lens : B + 1 and B integers
        """
        page_size = self._shape[-1]
        starts, lens = np.asarray(query_starts, np.int32), np.asarray(kv_lens, np.int32)
        counts = -(-lens // page_size)
        indptr = np.zeros(len(lens) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        pages = page_table[np.arange(page_table.shape[1]) < counts[:, None]]
        # The wrappers read these lists on the host and copy them. Page indices they need only on the device.
        lists = (
            self._host(indptr),
            to_device(pages, self._device),
            self._host(lens - (counts - 1) * page_size),
        )
        if starts[-1] == len(lens):
            wrapper, options = self._decode, self._options
        else:
            wrapper, options = self._prefill, {**self._options, "causal": True}
            lists = self._host(starts), *lists  # type: ignore[assignment]
        # A wrapper copies its plan from pinned memory of its own, which the next plan overwrites.
        if wrapper in self._copied:
            self._copied[wrapper].synchronize()
        wrapper.plan(*lists, *self._shape, **options)
        if self._device.type == "cuda":
            self._copied[wrapper] = torch.cuda.Event()
            self._copied[wrapper].record()
        self._planned = wrapper

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """The attention of one layer for the planned batch, (T, heads, head_dim).

        q : (T, heads, head_dim), with contiguous heads
        k_pages, v_pages : (num_pages, kv_heads, page_size, head_dim)
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._planned.run(q, (k_pages, v_pages), out=out)
        return out

    def warm_up(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """Compile or load every kernel that a step can need. Pages are read, and not written."""
        heads, _, head_dim, page_size = self._shape
        for new in (1, 2):
            table = np.zeros((1, -(-new // page_size)), np.int32)
            self.plan(table, [0, new], [new])
            self.run(
                torch.zeros(new, heads, head_dim, dtype=self._dtype, device=self._device), k_pages, v_pages
            )

    def _host(self, array: NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor
