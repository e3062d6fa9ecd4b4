"""The oracle against the definition spelled out position by position, and against what is known of it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.reference import (
    block_sparse_attention_reference,
    dilated_attention_reference,
    multiplicity,
)

SEMANTICS = Path(__file__).parents[1] / "docs" / "semantics.md"


@dataclass(frozen=True)
class Case:
    n: int
    num_heads: int
    num_kv_heads: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    batch_size: int = 1
    is_masked: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    scale: float | None = None

    @property
    def branches(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.segment_lengths, self.dilation_rates

    def inputs(self, d: int = 3) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(self.batch_size, self.n, heads, d, dtype=torch.float64, generator=generator)
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        )
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def key_mask(self) -> Tensor | None:
        if not self.is_masked:
            return None
        mask = torch.rand(self.batch_size, self.n, generator=torch.Generator().manual_seed(1)) > 0.4
        mask[-1] = False
        return mask

    def boundaries(self) -> Tensor | None:
        return None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, dtype=torch.int32)


CASES = [
    pytest.param(Case(13, 4, 2, (3, 5, 8), (1, 2, 3), batch_size=2, is_masked=True), id="gqa-masked"),
    pytest.param(Case(12, 3, 1, (4, 100), (2, 5), cu_seqlens=(0, 5, 5, 6, 12)), id="packed"),
    pytest.param(Case(11, 5, 5, (6, 7, 7), (4, 3, 3), scale=1.7), id="odd-heads"),
    pytest.param(Case(9, 2, 2, (4, 4, 9), (2, 3, 7), is_masked=True, cu_seqlens=(0, 4, 9)), id="few-heads"),
    pytest.param(Case(1, 1, 1, (1, 4, 7), (1, 4, 2)), id="one-token"),
]
OPTIONS = [
    dict(zip(("is_causal", "head_mixing", "head_offsets", "tail", "detach_mixing"), values, strict=True))
    for values in itertools.product(
        (False, True), ("all", "grouped"), ("interleaved", "blocked"), ("exact", "phantom"), (False, True)
    )
]


def naive_offset(case: Case, branch: int, head: int, options: dict[str, Any]) -> int | None:
    """The offset of a head in a branch, or None when the branch does not serve the head."""
    rate, num_branches = case.dilation_rates[branch], len(case.dilation_rates)
    if options["head_mixing"] == "grouped":
        sizes = [len(range(i, case.num_heads, num_branches)) for i in range(num_branches)]
        groups = [i for i, size in enumerate(sizes) for _ in range(size)]
        return branch % rate if groups[head] == branch else None
    if options["head_offsets"] == "blocked":
        return head // ((case.num_heads + rate - 1) // rate)
    return head % rate


def naive_keys(
    case: Case, branch: int, head: int, query: int, options: dict[str, Any]
) -> tuple[list[int], int]:
    """The keys that one query reaches through one branch, and the number of its phantom keys."""
    w, r = case.segment_lengths[branch], case.dilation_rates[branch]
    offset = naive_offset(case, branch, head, options)
    bounds = case.cu_seqlens or (0, case.n)
    start, stop = next((a, b) for a, b in itertools.pairwise(bounds) if a <= query < b)
    w = min(w, stop - start)
    segment, place = divmod(query - start, w)
    if place % r != offset:
        return [], 0
    keys, num_phantoms = [], 0
    for p in range(math.ceil(w / r) * r):
        position = start + segment * w + p
        if p % r != offset or (options["is_causal"] and p > place):
            continue
        if p < w and position < stop:
            keys.append(position)
        elif options["tail"] == "phantom":
            num_phantoms += 1
    return keys, num_phantoms


def naive_attention(
    case: Case, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Every query gathers its keys, repeats included, and takes one ordinary softmax over them."""
    key_mask = case.key_mask()
    scale = q.shape[-1] ** -0.5 if case.scale is None else case.scale
    outs, lses = {}, {}
    for b, h, t in itertools.product(range(case.batch_size), range(case.num_heads), range(case.n)):
        kv_head = h // (case.num_heads // case.num_kv_heads)
        logits, values = [], []
        for i in range(len(case.segment_lengths)):
            keys, num_phantoms = naive_keys(case, i, h, t, options)
            keys = [j for j in keys if key_mask is None or key_mask[b, j]]
            logits.append(torch.cat([scale * (k[b, keys, kv_head] @ q[b, t, h]), q.new_zeros(num_phantoms)]))
            values.append(torch.cat([v[b, keys, kv_head], v.new_zeros(num_phantoms, v.shape[-1])]))
        joint = torch.cat(logits)
        if len(joint) == 0:
            outs[b, t, h], lses[b, h, t] = torch.zeros_like(q[b, t, h]), q.new_tensor(-math.inf)
            continue
        lses[b, h, t] = torch.log(torch.exp(joint).sum())
        if options["detach_mixing"]:
            parts = [(x, y) for x, y in zip(logits, values, strict=True) if len(x)]
            shares = [(torch.exp(x).sum() / torch.exp(joint).sum()).detach() for x, _ in parts]
            outs[b, t, h] = sum(s * (x.softmax(0) @ y) for s, (x, y) in zip(shares, parts, strict=True))
        else:
            outs[b, t, h] = joint.softmax(0) @ torch.cat(values)
    out = torch.stack([outs[i] for i in sorted(outs)]).reshape(q.shape)
    lse = torch.stack([lses[i] for i in sorted(lses)]).reshape(case.batch_size, case.num_heads, case.n)
    return out, lse


def gradients(out: Tensor, lse: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of a fixed random projection of `out` and of the finite part of `lse`."""
    generator = torch.Generator().manual_seed(2)
    loss = (out * torch.randn(out.shape, dtype=out.dtype, generator=generator)).sum()
    finite = torch.where(torch.isfinite(lse), lse, 0.0)
    loss = loss + (finite * torch.randn(lse.shape, dtype=lse.dtype, generator=generator)).sum()
    if not loss.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(str(x) for x in o.values()))
@pytest.mark.parametrize("case", CASES)
def test_equals_the_naive_definition(case: Case, options: dict[str, Any]) -> None:
    inputs = case.inputs()
    actual = dilated_attention_reference(
        *inputs,
        *case.branches,
        scale=case.scale,
        key_mask=case.key_mask(),
        cu_seqlens=case.boundaries(),
        return_lse=True,
        **options,
    )
    expected = naive_attention(case, *inputs, options)
    assert_same(actual, expected)
    assert_same(gradients(*actual, inputs), gradients(*expected, inputs))


def test_blocks_by_hand() -> None:
    """The layouts: batch 1, head 1 alone sees its second layout."""
    q, k, v = (torch.randn(2, 3, 2, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.zeros(4, 3, 3, dtype=torch.bool)
    mask[3, 1, 2] = True
    out, lse = block_sparse_attention_reference(q, k, v, mask, return_lse=True)
    expected = torch.zeros_like(out)
    expected[1, 1, 1] = v[1, 2, 1]
    assert torch.equal(out, expected)
    assert lse.isfinite().nonzero().tolist() == [[1, 1, 1]]
    assert_same(lse[1, 1, 1], q[1, 1, 1] @ k[1, 2, 1] / 2)
    with pytest.raises(ValueError, match="1, 2 or 2 x 2 layouts, got 3"):
        block_sparse_attention_reference(q, k, v, mask[:3])


@pytest.mark.parametrize("case", CASES)
def test_multiplicity_counts_every_way_to_a_key(case: Case) -> None:
    for is_causal, mixing, offsets in itertools.product(
        (False, True), ("all", "grouped"), ("interleaved", "blocked")
    ):
        options: dict[str, Any] = {"is_causal": is_causal, "head_mixing": mixing, "head_offsets": offsets}
        counts = multiplicity(case.n, case.num_heads, *case.branches, cu_seqlens=case.boundaries(), **options)
        expected = torch.zeros(case.num_heads, case.n, case.n, dtype=torch.int64)
        for i, h, t in itertools.product(
            range(len(case.segment_lengths)), range(case.num_heads), range(case.n)
        ):
            for j in naive_keys(case, i, h, t, {**options, "tail": "exact"})[0]:
                expected[h, t, j] += 1
        torch.testing.assert_close(counts, expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("segment_length", [37, 1000])
def test_one_segment_at_rate_one_is_dense_attention(
    is_causal: bool, scale: float | None, segment_length: int
) -> None:
    inputs = Case(37, 6, 2, (37,), (1,), batch_size=2).inputs(d=8)
    actual = dilated_attention_reference(*inputs, (segment_length,), (1,), is_causal=is_causal, scale=scale)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)
    assert_same(actual, expected.transpose(1, 2))
    cotangent = torch.randn_like(actual)
    assert_same(
        torch.autograd.grad(actual, inputs, cotangent),
        torch.autograd.grad(expected.transpose(1, 2), inputs, cotangent),
    )


@pytest.mark.parametrize("detach_mixing", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_queries_without_keys_give_zeros_and_no_gradient(is_causal: bool, detach_mixing: bool) -> None:
    """Unselected ones, and all of a batch whose keys are hidden; a gradient of their lse becomes no NaN."""
    inputs = Case(11, 2, 2, (6,), (4,), batch_size=2).inputs()
    options: dict[str, Any] = {"is_causal": is_causal, "detach_mixing": detach_mixing, "return_lse": True}
    mask = torch.tensor([[True], [False]]).expand(2, 11)
    out, lse = dilated_attention_reference(*inputs, (6,), (4,), key_mask=mask, **options)
    place = torch.arange(11) % 6 % 4
    is_met = torch.stack([place == 0, place == 1], 1) & torch.tensor([True, False])[:, None, None]
    assert (out[~is_met] == 0).all()
    assert torch.equal(lse.isfinite(), is_met.transpose(1, 2))
    assert (lse.transpose(1, 2)[~is_met] == -math.inf).all()
    for grad in torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse))):
        assert torch.isfinite(grad).all()
        assert (grad[~is_met] == 0).all()


def padded_branch(q: Tensor, k: Tensor, v: Tensor, w: int, r: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    """One branch on zero-padded tensors: out (b, n, h, d) and lse (b, n, h), -inf where not selected."""
    _, n, h, d = q.shape
    w = min(w, n)
    tensors = []
    for x in (q, k, v):
        x = F.pad(x, (0, 0, 0, 0, 0, -n % w)).unflatten(1, (-1, w))
        tensors.append(F.pad(x, (0, 0, 0, 0, 0, -w % r)))
    out, lse = torch.zeros_like(tensors[0]), tensors[0].new_full(tensors[0].shape[:-1], -math.inf)
    for head in range(h):
        offset = head // math.ceil(h / r)
        sparse_q, sparse_k, sparse_v = (x[:, :, offset::r, head] for x in tensors)
        scores = sparse_q @ sparse_k.transpose(-1, -2) / math.sqrt(d)
        if is_causal:
            scores = scores + torch.full(scores.shape[-2:], -math.inf, dtype=q.dtype).triu(1)
        out[:, :, offset::r, head] = scores.softmax(-1) @ sparse_v
        lse[:, :, offset::r, head] = scores.logsumexp(-1)
    return out[:, :, :w].flatten(1, 2)[:, :n], lse[:, :, :w].flatten(1, 2)[:, :n]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("detach_mixing", [False, True])
@pytest.mark.parametrize("n", [1, 16, 29])
def test_phantom_tail_equals_zero_padding(n: int, detach_mixing: bool, is_causal: bool) -> None:
    branches = ((1, 5, 8, 12, 64), (1, 2, 4, 5, 3))
    inputs = Case(n, 5, 5, *branches, batch_size=2).inputs()
    parts = [padded_branch(*inputs, w, r, is_causal) for w, r in zip(*branches, strict=True)]
    mixing = torch.stack([lse for _, lse in parts]).softmax(0)
    mixing = mixing.detach() if detach_mixing else mixing
    expected = sum(weight.unsqueeze(-1) * out for weight, (out, _) in zip(mixing, parts, strict=True))
    actual = dilated_attention_reference(
        *inputs,
        *branches,
        is_causal=is_causal,
        head_offsets="blocked",
        tail="phantom",
        detach_mixing=detach_mixing,
    )
    assert_same(actual, expected)
    cotangent = torch.randn_like(actual)
    assert_same(
        torch.autograd.grad(actual, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent)
    )


@pytest.mark.parametrize("detach_mixing", [False, True])
def test_dropout_acts_on_each_probability(detach_mixing: bool) -> None:
    n, p = 24, 0.25
    q, k, _ = Case(n, 2, 2, (n,), (1,)).inputs()
    one_hot = torch.eye(n, dtype=q.dtype)[None, :, None].expand(1, n, 2, n)  # the output is the probabilities
    # Two equal branches: every key is there twice, and each of the two is dropped on its own.
    branches = ((n, n), (1, 1))
    probs = dilated_attention_reference(q, k, one_hot, *branches)
    torch.manual_seed(0)
    dropped, lse = dilated_attention_reference(
        q, k, one_hot, *branches, dropout_p=p, detach_mixing=detach_mixing, return_lse=True
    )
    ratio = (dropped / probs * (1 - p) * 2).detach()
    assert_same(ratio, ratio.round())
    shares = torch.bincount(ratio.round().flatten().long(), minlength=3) / ratio.numel()
    expected = torch.tensor([p * p, 2 * p * (1 - p), (1 - p) ** 2])
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.05)
    assert_same(lse, dilated_attention_reference(q, k, one_hot, *branches, return_lse=True)[1])

    nothing = dilated_attention_reference(q, k, one_hot, *branches, dropout_p=1.0)
    assert (nothing == 0).all()


def test_without_dropout_the_random_state_is_untouched() -> None:
    inputs = Case(6, 2, 2, (3,), (1,)).inputs()
    state = torch.get_rng_state()
    dilated_attention_reference(*inputs, (3,), (1,), detach_mixing=True)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    inputs = [x.detach().to(dtype) for x in Case(29, 4, 2, (8, 16), (1, 2)).inputs(d=8)]
    out, lse = dilated_attention_reference(*inputs, (8, 16), (1, 2), return_lse=True)
    wide = (x.double() for x in inputs)
    exact, exact_lse = dilated_attention_reference(*wide, (8, 16), (1, 2), return_lse=True)
    assert (out.dtype, lse.dtype, exact_lse.dtype) == (dtype, torch.float32, torch.float64)
    torch.testing.assert_close(out, exact.to(dtype))
    torch.testing.assert_close(lse, exact_lse.float())


def test_large_logits_stay_finite() -> None:
    inputs = Case(9, 2, 2, (3, 9), (1, 2)).inputs()
    for scale, tail in itertools.product((1e4, -1e4), ("exact", "phantom")):
        options: dict[str, Any] = {"scale": scale, "tail": tail, "return_lse": True}
        out, lse = dilated_attention_reference(*inputs, (3, 9), (1, 2), **options)
        assert all(x.isfinite().all() for x in (out, lse))
        assert all(x.isfinite().all() for x in torch.autograd.grad((out.sum(), lse.sum()), inputs))


def test_bad_input_states_rule_and_fact() -> None:
    q, k, v = Case(8, 3, 2, (4,), (1,)).inputs()
    twice, bounds = torch.cat([q, q]), torch.tensor([0, 8])
    falling = "cu_seqlens must rise from 0 to the sequence length 8"
    for tensors, branches, options, message in (
        ((q, k, v), ((4,), (1,)), {}, "got 2 key and 3 query heads"),
        ((q, q, q), ((4, 8), (1,)), {}, "same length"),
        ((q, q, q), ((4,), (1,)), {"tail": "padded"}, "tail must be"),
        *(
            ((q, q, q), ((4,), (1,)), {"cu_seqlens": torch.tensor(x)}, falling)
            for x in ([0, 7], [1, 8], [0, 5, 4, 8])
        ),
        ((twice,) * 3, ((4,), (1,)), {"cu_seqlens": bounds}, "got batch size 2"),
    ):
        with pytest.raises(ValueError, match=message):
            dilated_attention_reference(*tensors, *branches, **options)


def test_the_drawing_in_the_documentation_is_true() -> None:
    through_first, through_second = (
        multiplicity(8, 2, (w,), (r,), is_causal=True) for w, r in ((4, 1), (8, 2))
    )
    both = multiplicity(8, 2, (4, 8), (1, 2), is_causal=True)
    assert torch.equal(both, through_first + through_second)
    symbols = (through_first + 2 * through_second).tolist()
    text = SEMANTICS.read_text(encoding="utf-8")
    for t in range(8):
        rows = ["  ".join("·ab2"[symbol] for symbol in symbols[head][t]) for head in range(2)]
        assert f"query {t}   {rows[0]}       {rows[1]}" in text


def test_detached_mixing_changes_only_the_gradient_of_the_output() -> None:
    inputs = Case(13, 2, 2, (4, 13), (1, 2)).inputs()
    joint, detached = (
        dilated_attention_reference(*inputs, (4, 13), (1, 2), detach_mixing=detach, return_lse=True)
        for detach in (False, True)
    )
    assert_same(detached, joint)
    cotangent = torch.randn_like(joint[1])
    of_joint, of_detached = (
        torch.autograd.grad(lse, inputs[:2], cotangent, retain_graph=True) for _, lse in (joint, detached)
    )
    assert_same(of_detached, of_joint)
    cotangent = torch.randn_like(joint[0])
    of_joint, of_detached = (torch.autograd.grad(out, inputs, cotangent) for out, _ in (joint, detached))
    assert_same(of_detached[2], of_joint[2])
    assert (of_detached[0] - of_joint[0]).abs().max() > 1e-3
    assert (of_detached[1] - of_joint[1]).abs().max() > 1e-3
