"""A stand-in for the module `flashinfer`: its paged wrappers by their documentation (0.6.18, 0.7.2), on any
device, computed by the reference. It fails where the library would, or would return something else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.kernels.reference.attention import paged_attention


class Stub:
    """The module's stand-in. `calls` lists its wrappers' calls: (kind, "plan" or "run")."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.made: list[Any] = []
        calls, made = self.calls, self.made

        class Decode(_Decode):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(calls, *arguments, **options)
                made.append(self)

        class Prefill(_Prefill):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(calls, *arguments, **options)
                made.append(self)

        self.BatchDecodeWithPagedKVCacheWrapper = Decode
        self.BatchPrefillWithPagedKVCacheWrapper = Prefill


class _Wrapper:
    kind = ""

    def __init__(self, calls: list[tuple[str, str]], workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert workspace.dim() == 1
        assert not workspace.any(), "zeros for its first use"
        assert workspace.data_ptr() % 16 == 0
        assert kv_layout in ("NHD", "HND")
        self.calls, self.workspace, self.layout = calls, workspace, kv_layout
        self.device = workspace.device
        self.planned: dict[str, Any] | None = None

    def _plan(
        self,
        starts: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last: Tensor,
        shape: tuple[int, int, int, int],
        *,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        heads, kv_heads, head_dim, page_size = shape
        assert heads % kv_heads == 0
        for each in (starts, indptr, last):
            assert each.device.type == "cpu", "a list on the device is copied back: the host waits"
        assert indices.device == self.device
        for each in (starts, indptr, indices, last):
            assert each.dtype == torch.int32
            assert each.dim() == 1
            assert each.is_contiguous()
        assert len(starts) == len(indptr) == len(last) + 1
        assert starts[0] == indptr[0] == 0
        counts = indptr.diff()
        assert (counts > 0).all()
        assert int(indptr[-1]) == len(indices)
        assert ((last >= 1) & (last <= page_size)).all()
        lens = (counts - 1) * page_size + last
        assert (lens >= starts.diff()).all()
        table = torch.zeros(len(last), int(counts.max()), dtype=torch.int32)
        for row, (begin, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
            table[row, : end - begin] = indices[begin:end]
        self.planned = {
            "tokens": int(starts[-1]),
            "shape": shape,
            "dtypes": (q_data_type, q_data_type if kv_data_type is None else kv_data_type),
            "lists": (table, starts.clone(), lens),
            "scale": head_dim**-0.5 if sm_scale is None else sm_scale,
            "window": window_left + 1,
            "soft_cap": logits_soft_cap or 0.0,
        }
        self.calls.append((self.kind, "plan"))

    def run(self, q: Tensor, paged_kv_cache: Any, *, out: Tensor | None = None) -> Tensor:
        plan = self.planned
        assert plan is not None, "plan comes first"
        heads, kv_heads, head_dim, page_size = plan["shape"]
        assert q.shape == (plan["tokens"], heads, head_dim)
        assert q.stride(2) == 1
        k_pages, v_pages = paged_kv_cache
        assert (q.dtype, k_pages.dtype) == plan["dtypes"]
        expected = (page_size, kv_heads) if self.layout == "NHD" else (kv_heads, page_size)
        assert k_pages.shape[1:] == v_pages.shape[1:] == (*expected, head_dim)
        assert k_pages.stride() == v_pages.stride(), "its kernels take the strides of keys for both"
        assert k_pages.stride(3) == 1
        for each in (q, k_pages, v_pages):
            assert each.device == self.device
        if self.layout == "NHD":
            k_pages, v_pages = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
        if out is not None:
            assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
        self.calls.append((self.kind, "run"))
        found = paged_attention(
            q.contiguous(),
            k_pages,
            v_pages,
            *plan["lists"],
            scale=plan["scale"],
            window=plan["window"],
            soft_cap=plan["soft_cap"],
        )
        return found if out is None else out.copy_(found)


class _Decode(_Wrapper):
    kind = "decode"

    def __init__(
        self,
        calls: Any,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        *,
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(calls, float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        group = num_qo_heads // num_kv_heads
        assert self.use_tensor_cores or group in (1, 2, 3, 4, 6, 8), "Unsupported group_size"
        starts = torch.arange(len(indptr), dtype=torch.int32)
        shape = num_qo_heads, num_kv_heads, head_dim, page_size
        self._plan(starts, indptr, indices, last_page_len, shape, **options)


class _Prefill(_Wrapper):
    kind = "prefill"

    def __init__(self, calls: Any, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(calls, float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        **options: Any,
    ) -> None:
        assert causal, "the reference is"
        lists = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._plan(*lists, (num_qo_heads, num_kv_heads, head_dim_qk, page_size), **options)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """The stub in the place of the module, with small workspaces."""
    from ramify.kernels import flashinfer as ours

    stub = Stub()
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", stub)  # type: ignore[arg-type]
    monkeypatch.setattr(ours, "WORKSPACE", 1 << 12)
    return stub
