"""Many short packed documents against one document of the same length and number of pairs of the definition.

    python benchmarks/packed_documents.py [--documents 1300] [--length 20000] [--rounds 7]

Checks the packed call against the documents one by one, then times both in turn. Target: at most 1.5 times.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from dilated_attention_pytorch import dilated_attention
from dilated_attention_pytorch.cli.bench.gate import WrongAnswerError, accept, largest_error
from dilated_attention_pytorch.cli.bench.measure import interleave
from dilated_attention_pytorch.plan import Shape, plan_dilated
from dilated_attention_pytorch.spec import DilatedSpec

TARGET = 1.5
HEADS, HEAD_DIM = 8, 64
BRANCHES = ((2048, 4096, 8192), (1, 2, 4))
Branches = tuple[tuple[int, ...], tuple[int, ...]]


def count_pairs(branches: Branches, n: int, is_causal: bool, docs: tuple[int, ...] | None = None) -> int:
    shape = Shape(1, n, HEADS, HEADS, HEAD_DIM)
    return plan_dilated(DilatedSpec(*branches, is_causal), shape, itemsize=4, docs=docs).num_pairs


def branches_of_one(n: int, is_causal: bool, pairs: int) -> Branches:
    """Short segments of one document of n tokens that score at least as many pairs."""
    for w in range(1, n):
        branches = ((w, 2 * w, 4 * w), (1, 1, 1) if w < 2 else (1, 2, 2) if w < 4 else (1, 2, 4))
        if count_pairs(branches, n, is_causal) >= pairs:
            return branches
    raise ValueError(f"one document of {n} tokens scores fewer than {pairs} pairs")


def check(tensors: list[Tensor], bounds: list[int], is_causal: bool) -> float:
    """The largest difference to documents that are attended one by one."""
    with torch.no_grad():
        packed = dilated_attention(*tensors, *BRANCHES, is_causal=is_causal, cu_seqlens=torch.tensor(bounds))
        error = 0.0
        for lo, hi in pairwise(bounds[:200]):
            one = dilated_attention(*(x[:, lo:hi] for x in tensors), *BRANCHES, is_causal=is_causal)
            error = max(error, largest_error(packed[:, lo:hi], one))
    try:
        return accept("packed documents against single ones", error)
    except WrongAnswerError as wrong:
        raise SystemExit(str(wrong)) from None


def main() -> None:
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--documents", type=int, default=1300)
    parser.add_argument("--length", type=int, default=20000, help="tokens of all documents together")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    n = options.length
    if not 2 <= options.documents <= n // 2:
        parser.error(f"--documents must be from 2 to half of --length, got {options.documents}")
    torch.manual_seed(0)
    cuts = (torch.randperm(n - 1)[: options.documents - 1] + 1).sort().values.tolist()
    bounds = [0, *cuts, n]
    q, k, v = (torch.randn(1, n, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    weight = torch.randn(1, n, HEADS, HEAD_DIM)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    for is_causal in (False, True):
        error = check([q, k, v], bounds, is_causal)
        pairs = count_pairs(BRANCHES, n, is_causal, tuple(bounds))
        one = branches_of_one(n, is_causal, pairs)

        def attend(
            branches: Branches, docs: Tensor | None, trains: bool, is_causal: bool = is_causal
        ) -> None:
            with torch.set_grad_enabled(trains):
                out = dilated_attention(q, k, v, *branches, is_causal=is_causal, cu_seqlens=docs)
            if trains:
                torch.autograd.grad(out, (q, k, v), weight)

        for trains in (False, True):
            calls = {
                "documents": partial(attend, BRANCHES, cu_seqlens, trains),
                "one": partial(attend, one, None, trains),
            }
            timings = interleave(calls, options.rounds)  # the first round, which plans, is not timed
            seconds = {name: timing.minimum for name, timing in timings.items()}
            ratio = seconds["documents"] / seconds["one"]
            name = f"{'causal ' if is_causal else ''}{'forward + backward' if trains else 'forward'}"
            print(
                f"{name:26} {seconds['documents'] * 1e3:8.1f} ms, one document {seconds['one'] * 1e3:8.1f}: "
                f"{ratio:.2f} ({'met' if ratio <= TARGET else 'not met'}: {TARGET}); right within {error:.0e}"
            )


if __name__ == "__main__":
    main()
