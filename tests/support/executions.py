"""Calls by flat options, as configurations hold them: how to run beside what to compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import BlockPattern, DilatedSpec, Execution
from dilated_attention_pytorch.functional import attend
from dilated_attention_pytorch.kernels import Request, kernels_for
from dilated_attention_pytorch.ops import Tensors, block_spec
from dilated_attention_pytorch.ring.attention import attend_ring, attend_ring_blocks
from dilated_attention_pytorch.ring.call import RingSettings
from dilated_attention_pytorch.spec import SPEC_FIELDS

# Without a C compiler there is no native kernel, and everything holds for the others.
CPU = torch.device("cpu")
FUSED = [k.name for k in kernels_for(CPU)[:-1] if k.why_not(Request(CPU, torch.float32)) is None]
Result = Tensor | tuple[Tensor, Tensor]


def packed(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a public function: kernel, workspace_bytes, memory, use_pattern_cache in one Execution."""
    names = ("kernel", "workspace_bytes", "memory", "use_pattern_cache")
    execution = Execution(**{name: options[name] for name in names if name in options})
    return {name: x for name, x in options.items() if name not in names} | {"execution": execution}


def take(options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The options of these names, which are removed."""
    return {name: options.pop(name) for name in names if name in options}


def dilated(
    q: Tensor, k: Tensor, v: Tensor, *branches: Any, return_lse: bool = False, **options: Any
) -> Result:
    """`dilated_attention`, also with steps and head_slice."""
    options = packed(options)
    spec = DilatedSpec(*branches, **take(options, SPEC_FIELDS))
    out, lse = attend(q, k, v, spec, **options)
    return (out, lse) if return_lse else out


def ring(q: Tensor, k: Tensor, v: Tensor, *branches: Any, **options: Any) -> Result:
    """`ring_dilated_attention`, also with steps."""
    options = packed(options)
    of_spec, settings = take(options, SPEC_FIELDS), RingSettings(**take(options, RingSettings._fields))
    return attend_ring(Tensors(q, k, v, **options), lambda: DilatedSpec(*branches, **of_spec), settings)


def ring_blocks(q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, **options: Any) -> Result:
    """`ring_block_sparse_attention`, also with steps."""
    options = {"is_causal": False, "scale": None, "dropout_p": 0.0, **packed(options)}
    of_spec = take(options, ("is_causal", "scale", "dropout_p"))
    settings = RingSettings(**take(options, RingSettings._fields))
    return attend_ring_blocks(Tensors(q, k, v, **options), pattern, lambda: block_spec(**of_spec), settings)
