"""Packed documents of similar lengths run side by side, as one batch: work follows tokens, not documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .core.workspace import Workspace
from .kernels import Inputs, Kernel, Merged
from .kernels.stock import mix_seed
from .plan import Plan, Shape
from .spec import DilatedSpec

LONG = 512  # tokens of a mean document from which on its own tiles are worth their overhead
MIN_SHARE = 4  # documents that differ from their neighbour for each batch that they are grouped into
MakePlan = Callable[[Shape], Plan]


class Batch(NamedTuple):
    """Documents of nearly one length: where their tokens are in the packed sequence."""

    rows: Tensor  # (documents, length) int64; behind a document's end its last token again
    real: Tensor | None  # (documents, length) bool, False behind the end; None where all are tokens

    def gather(self, slot: str, x: Tensor, inputs: Inputs) -> Tensor:
        """Rows of x (1, n, ...) as (documents, length, ...), zeros behind the ends; valid until the next."""
        shape = (*self.rows.shape, *x.shape[2:])
        taken = inputs.workspace.take(slot, shape, x.dtype, x.device)
        torch.index_select(x[0], 0, self.rows.flatten(), out=taken.flatten(0, 1))
        if self.real is not None:
            taken.flatten(0, 1).index_fill_(0, (~self.real).flatten().nonzero()[:, 0], 0)
        return taken

    def put(self, x: Tensor, part: Tensor) -> None:
        """Writes (documents, length, ...) into the rows of x (1, n, ...)."""
        rows, values = self.rows.flatten(), part.flatten(0, 1)
        if self.real is not None:
            index = self.real.flatten().nonzero()[:, 0]
            rows, values = rows[index], values.index_select(0, index)
        x[0].index_copy_(0, rows, values)


@dataclass(frozen=True)
class Documents:
    """All documents of a packed sequence, in batches; none where it is better to take them as they lie."""

    batches: tuple[Batch, ...]
    is_causal: bool = False  # no token sees what is behind the end

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for batch in self.batches for x in batch if x is not None)


def group_documents(bounds: tuple[int, ...], spec: DilatedSpec, rows_fit: int) -> Documents:
    """Batches of documents of which none has many more rows than `rows_fit`.

    Documents are filled up to a few lengths, at most a quarter more. Phantom keys depend on the length of a
    document, so that with them only equal ones run together.
    """
    edges = torch.tensor(bounds, device="cpu")
    lengths = edges.diff()
    starts, lengths = edges[:-1][lengths > 0], lengths[lengths > 0]
    filled = lengths
    if spec.is_causal or spec.tail == "exact":
        step = torch.exp2((lengths.float().log2().floor() - 2).clamp_min(2)).long()
        filled = (lengths + step - 1) // step * step
    kinds, counts = torch.unique(filled, return_counts=True)
    changes = int((lengths.diff() != 0).sum())
    if changes < MIN_SHARE * len(kinds) or bounds[-1] > LONG * len(lengths):
        return Documents(())
    order = filled.argsort(stable=True)
    batches = []
    for length, found in zip(kinds.tolist(), torch.split(order, counts.tolist()), strict=True):
        for part in torch.split(found, max(1, rows_fit // length)):
            offsets, own = torch.arange(length, device="cpu"), lengths[part, None]
            rows, real = starts[part, None] + torch.minimum(offsets, own - 1), offsets < own
            batches.append(Batch(rows, None if bool(real.all()) else real))
    return Documents(tuple(batches), spec.is_causal)


def forward(
    documents: Documents, kernel: Kernel, make_plan: MakePlan, inputs: Inputs
) -> tuple[Tensor, Tensor]:
    """As `kernel.forward` of the packed sequence."""
    q = inputs.q
    out = inputs.workspace.result(tuple(q.shape), q.dtype, q.device)
    lse = inputs.workspace.result((1, q.shape[2], q.shape[1]), inputs.accumulate_dtype, q.device)
    for batch, own in _batches(documents, inputs):
        part, lse_part = kernel.forward(make_plan(own.shape), own)
        batch.put(out, part)
        batch.put(lse.transpose(1, 2), lse_part.transpose(1, 2))
    return out, lse


def backward(
    documents: Documents, kernel: Kernel, make_plan: MakePlan, inputs: Inputs, merged: Merged
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernel.backward` of the packed sequence."""
    tensors = (inputs.q, inputs.k, inputs.v)
    dq, dk, dv = (inputs.workspace.result(tuple(x.shape), x.dtype, x.device) for x in tensors)
    for batch, own in _batches(documents, inputs):
        lse = batch.gather("docs_lse", merged.lse.transpose(1, 2), inputs)
        if batch.real is not None:
            lse.masked_fill_(~batch.real.unsqueeze(-1), math.inf)  # probability 0
        grad_lse = None
        if merged.grad_lse is not None:
            grad_lse = batch.gather("docs_grad_lse", merged.grad_lse.transpose(1, 2), inputs)
        part = Merged(
            batch.gather("docs_out", merged.out, inputs),
            lse.transpose(1, 2),
            batch.gather("docs_grad_out", merged.grad_out, inputs),
            None if grad_lse is None else grad_lse.transpose(1, 2),
        )
        own_gradients = kernel.backward(make_plan(own.shape), own, part)
        for gradient, own_gradient in zip((dq, dk, dv), own_gradients, strict=True):
            batch.put(gradient, own_gradient)
    return dq, dk, dv


def _batches(documents: Documents, inputs: Inputs) -> Iterator[tuple[Batch, Inputs]]:
    """Each batch with its tensors and, for dropout, a seed of its own."""
    device = inputs.q.device
    for number, (rows, real) in enumerate(documents.batches):
        batch = Batch(rows.to(device), None if real is None else real.to(device))
        q, k, v = (batch.gather(f"docs_{name}", getattr(inputs, name), inputs) for name in "qkv")
        mask = None if documents.is_causal else batch.real
        if inputs.key_mask is not None:
            mask = batch.gather("docs_mask", inputs.key_mask, inputs)
        seed = mix_seed(inputs.seed + number)
        hides_zeros, scratch = inputs.key_mask is None, _results_in_scratch(inputs.workspace)
        own: dict[str, Any] = {"q": q, "k": k, "v": v, "key_mask": mask, "seed": seed}
        yield batch, replace(inputs, **own, hides_zeros=hides_zeros, workspace=scratch)


def _results_in_scratch(workspace: Workspace) -> Workspace:
    """The same scratch, with the results of one batch in it: fresh memory would cost more than the copies."""
    own, numbers = copy(workspace), count()
    own.make_result = lambda *size: workspace.take(f"docs_result_{next(numbers)}", *size)
    return own
