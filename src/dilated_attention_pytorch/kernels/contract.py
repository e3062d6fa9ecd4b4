"""The contract every kernel keeps: a whole plan and the tensors of a call in, (out, lse) out; and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.workspace import Workspace
from ..plan.runs import Plan, Region, Shape
from .merge import merge_
from .rows import Rows

Outputs = tuple[Tensor, Tensor]  # out and lse
Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk and dv


class Request(NamedTuple):
    """What a call asks of a kernel, as far as it decides whether a kernel can run."""

    device: torch.device
    dtype: torch.dtype
    masked: bool = False
    dropout: bool = False
    scale: float = 1.0
    head_dim: int = 64
    rows: int = 0  # query rows that branches meet, and the pairs of a query and a key; 0: not known
    pairs: int = 0
    streams: bool = False  # some keys are not among the inputs: those of other ranks, or of a cache
    tiled: bool = False  # tiles hide single pairs of queries and keys

    def mismatch(
        self, dtypes: Collection[torch.dtype], device: str = "cpu", where: str = "it runs on cpu"
    ) -> str | None:
        """Why a kernel for tensors of such dtypes on such a device cannot run."""
        if self.device.type != device:
            return f"{where}, and the tensors are on {self.device}"
        if self.dtype not in dtypes:
            return f"it takes {', '.join(map(str, dtypes))}, and the tensors are {self.dtype}"
        return None


class Dropout(NamedTuple):
    """Drops attention probabilities by what a seed makes of the numbers of a query row and a key.

    So a query and a key draw the same in both passes, however the work is cut.
    """

    p: float
    seed: int
    rows: Tensor  # (batch, heads, queries) int64
    keys: Tensor  # (batch, key heads, keys) int64


class How(NamedTuple):
    """How packed rows attend.

    `mask` (batch, key heads, keys) is True where a key may be attended, `pairs` (batch, queries, keys) where
    a query of any head may attend a key.
    """

    is_causal: bool
    scale: float
    mask: Tensor | None = None
    dropout: Dropout | None = None
    pairs: Tensor | None = None


class Attended(NamedTuple):
    """Packed rows, what the *merged* softmax made of them (lse +inf for empty rows), and its gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    how: How


Forward = Callable[[Tensor, Tensor, Tensor, How], Outputs]
Backward = Callable[[Attended], Gradients]
Join = Callable[[Tensor, Tensor, Tensor, How, Tensor, Tensor], None]


class Op(NamedTuple):
    """Attention of packed rows, the inner part of a kernel.

    `forward(q, k, v, how)`: q (B, H, N, d), k and v (B, H_kv, M, d), H a multiple of H_kv, N == M when
    causal; returns out like q and lse (B, H, N), natural log, in float32 (float64 for float64). A row
    without a visible key gives out 0 and lse -inf.

    `backward(attended)`: the share (dq, dk, dv) of these rows and keys in the joint gradient.

    `join(q, k, v, how, out, lse)`: what `extend` does, where an op can do it at once.
    """

    forward: Forward
    backward: Backward
    widens: bool = False  # half precision reaches it as float32
    reads_strides: bool = False  # rows need not be packed, if their features lie side by side
    join: Join | None = None

    def extend(self, q: Tensor, k: Tensor, v: Tensor, how: How, out: Tensor, lse: Tensor) -> None:
        """More keys for rows; `out` and `lse`, in accumulation precision, are those of the keys so far."""
        if self.join is None:
            merge_(out, lse, *self.forward(q, k, v, how))
        else:
            self.join(q, k, v, how, out, lse)


def with_lse_gradient(op_backward: Backward) -> Backward:
    """A backward, from that of an op which ignores `grad_lse`.

    Such an op computes dS = P * (grad_out v^T - rowsum(grad_out * out)). With v = 0, out = (-1, 0, ...) and
    grad_out = (grad_lse, 0, ...) that is P * grad_lse: exactly the missing part, for one more call.
    """

    def backward(x: Attended) -> Gradients:
        dq, dk, dv = op_backward(x)
        if x.grad_lse is None:
            return dq, dk, dv
        # Half precision cannot hold a large gradient of the float32 lse; its share of the largest it can.
        largest = x.grad_lse.abs().amax().clamp_min(torch.finfo(x.grad_lse.dtype).tiny)
        grad, minus_one = (
            F.pad(first.unsqueeze(-1).to(x.q.dtype), (0, x.q.shape[-1] - 1))
            for first in (x.grad_lse / largest, torch.full_like(x.grad_lse, -1.0))
        )
        part = op_backward(x._replace(grad_out=grad, v=torch.zeros_like(x.v), out=minus_one))
        return dq + part[0] * largest, dk + part[1] * largest, dv

    return backward


class Inputs(NamedTuple):
    """The tensors of a call: q (b, n, h, d), k and v (b, n, h_kv, d), key_mask (b, n), and its settings."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    scale: float
    dropout_p: float
    seed: int
    workspace: Workspace

    @property
    def shape(self) -> Shape:
        return Shape.of(self.q, self.k)

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return torch.promote_types(self.q.dtype, torch.float32)

    def new_outputs(self) -> Outputs:
        """Memory of out (b, n, h, d) like q and of lse (b, h, n) in float32 (float64 for float64)."""
        b, n, h, _ = self.q.shape
        out = self.workspace.result(self.q.shape, self.q.dtype, self.q.device)
        return out, self.workspace.result((b, h, n), self.accumulate_dtype, self.q.device)

    def new_gradients(self) -> Gradients:
        """Memory of dq, dk and dv."""
        dq, dk, dv = (self.workspace.result(x.shape, x.dtype, x.device) for x in (self.q, self.k, self.v))
        return dq, dk, dv


class Merged(NamedTuple):
    """What the forward left, and the gradients of it."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None


class RemoteKV(Protocol):
    """Keys and values that are not among the inputs, chunk by chunk, for the queries of a region."""

    def chunks(self, region: Region) -> Iterator[Chunk]: ...
    def chunks_with_gradients(self, region: Region, dk: Tensor, dv: Tensor) -> Iterator[Chunk]:
        """After a chunk was attended its gradients leave; what others computed is added to dk and dv."""


class Chunk(Protocol):
    """Keys and values of some positions, and the jobs in which the queries meet them."""

    @property
    def plan(self) -> Plan: ...
    def gather(self, rows: Rows, branch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """k and v (jobs, 1, rows, d) of jobs of a branch and their mask, packed."""

    def add(self, rows: Rows, branch: int, dk: Tensor, dv: Tensor) -> None:
        """Adds to the gradients of the rows, in a backward pass."""


class Kernel(NamedTuple):
    """A way to run a plan, forward and backward; `why_not` says why it cannot run a request."""

    name: str
    why_not: Callable[[Request], str | None]
    forward: Callable[..., Outputs]  # (plan, inputs, remote=None)
    backward: Callable[..., Gradients]  # (plan, inputs, merged, remote=None)
    op: Op  # what it attends packed rows with
    each_key_once: bool = False  # whether it takes all branches of a query in one job
    packs: bool = True  # whether it gathers rows, so that the workspace bounds its jobs
