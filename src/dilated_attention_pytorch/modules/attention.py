"""`DilatedAttention`: the functional door with its options kept in a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..functional import check_execution, dilated_attention
from ..plan import DEFAULT_WORKSPACE_BYTES
from ..spec import DilatedSpec, HeadMixing, HeadOffsets, Tail


class DilatedAttention(nn.Module):
    """Dilated attention over (b, n, h, d) tensors; see `dilated_attention` for what it computes.

    Args:
        segment_lengths, dilation_rates: one entry a branch.
        softmax_scale: factor of the scores, 1 / sqrt(d) by default.
        attention_dropout: probability to drop an attention weight, in training only; also `dropout`.
        head_mixing, head_offsets, tail, detach_mixing, kernel, workspace_bytes: as in `dilated_attention`.
        use_pattern_cache: plans are cached by shape; switching that off is not available yet and raises.
        enable_memory_pool, lightweight_pool, enable_profiling: not available yet; True raises.
        device, dtype: what the inputs must have, checked when given. The module has no parameters of its own.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        dropout: float | None = None,
        enable_memory_pool: bool = False,
        enable_profiling: bool = False,
        lightweight_pool: bool = False,
        use_pattern_cache: bool = True,
        head_mixing: HeadMixing = "all",
        head_offsets: HeadOffsets = "interleaved",
        tail: Tail = "exact",
        detach_mixing: bool = False,
        kernel: str = "auto",
        workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dropout is not None and attention_dropout not in (0.0, dropout):
            raise ValueError(
                "dropout and attention_dropout are one option, got the two values "
                f"{dropout} and {attention_dropout}"
            )
        later = {
            "enable_memory_pool": enable_memory_pool,
            "enable_profiling": enable_profiling,
            "lightweight_pool": lightweight_pool,
            "use_pattern_cache=False": not use_pattern_cache,
        }
        if asked := [name for name, value in later.items() if value]:
            raise ValueError(f"not available in this version: {', '.join(asked)}")
        self.spec = DilatedSpec(
            segment_lengths,
            dilation_rates,
            scale=softmax_scale,
            dropout_p=attention_dropout if dropout is None else dropout,
            head_mixing=head_mixing,
            head_offsets=head_offsets,
            tail=tail,
            detach_mixing=detach_mixing,
        )
        check_execution(kernel, workspace_bytes)
        # A bool, because torch.compile turns a float it reads from a module into a symbol and compiles twice.
        self._drops = self.spec.dropout_p > 0
        self.kernel, self.workspace_bytes = kernel, workspace_bytes
        self.enable_memory_pool, self.use_pattern_cache = enable_memory_pool, use_pattern_cache
        self.device = None if device is None else torch.device(device)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        self.dtype = dtype

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """query (b, n, h, d), key and value (b, n, h_kv, d) -> (b, n, h, d).

        `attention_mask` is (b, n) bool, True where a key may be attended.
        """
        self._check_declared(query)
        spec = self.spec
        return dilated_attention(
            query,
            key,
            value,
            spec.segment_lengths,
            spec.dilation_rates,
            is_causal=is_causal,
            scale=spec.scale,
            dropout_p=spec.dropout_p if self.training and self._drops else 0,
            key_mask=attention_mask,
            head_mixing=spec.head_mixing,
            head_offsets=spec.head_offsets,
            tail=spec.tail,
            detach_mixing=spec.detach_mixing,
            kernel=self.kernel,
            workspace_bytes=self.workspace_bytes,
        )

    def _check_declared(self, query: Tensor) -> None:
        if not isinstance(query, Tensor):
            return  # dilated_attention rejects it
        if self.dtype is not None and query.dtype != self.dtype:
            raise TypeError(f"this module was made for {self.dtype}, got {query.dtype}")
        if self.device is not None and (
            query.device.type != self.device.type or self.device.index not in (None, query.device.index or 0)
        ):
            raise ValueError(f"this module was made for the device {self.device}, got {query.device}")

    def extra_repr(self) -> str:
        spec = self.spec
        text = f"segment_lengths={spec.segment_lengths}, dilation_rates={spec.dilation_rates}"
        changed = {
            "softmax_scale": (spec.scale, None),
            "attention_dropout": (spec.dropout_p, 0.0),
            "head_mixing": (spec.head_mixing, "all"),
            "head_offsets": (spec.head_offsets, "interleaved"),
            "tail": (spec.tail, "exact"),
            "detach_mixing": (spec.detach_mixing, False),
            "kernel": (self.kernel, "auto"),
            "workspace_bytes": (self.workspace_bytes, DEFAULT_WORKSPACE_BYTES),
            "device": (self.device, None),
            "dtype": (self.dtype, None),
        }
        return text + "".join(f", {name}={v!r}" for name, (v, default) in changed.items() if v != default)
