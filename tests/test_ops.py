"""The custom op under PyTorch's machinery: compile, export, opcheck, checkpointing, autocast, FLOPs, meta."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import DilatedAttention, DilatedSpec, Execution, dilated_attention
from dilated_attention_pytorch.ops import attention_op, write_execution, write_spec
from dilated_attention_pytorch.reference import multiplicity
from support.executions import FUSED
from support.op_checks import check_autocast, check_checkpointing
from support.tolerances import assert_close, assert_same_gradients

SEGMENTS, RATES = (8, 14, 40), (1, 2, 5)
DROPOUT = DilatedAttention(SEGMENTS, RATES, attention_dropout=0.2)
SPEC = write_spec("dilated", DilatedSpec(SEGMENTS, RATES, True, 0.3), 1, ())
OPTIONS = (*(None,) * 5, SPEC, write_execution(Execution("auto", 2**20, "pool")))  # after cu_seqlens


def qkv(n: int, dtype: torch.dtype = torch.float32, b: int = 2) -> tuple[Tensor, ...]:
    return tuple(torch.randn(b, n, heads, 8, dtype=dtype, requires_grad=True) for heads in (6, 2, 2))


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return dilated_attention(q, k, v, SEGMENTS, RATES, **options)


@pytest.mark.parametrize(
    "function",
    [attention, DilatedAttention(SEGMENTS, RATES), DROPOUT],
    ids=["function", "module", "dropout"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_once_for_all_lengths(function: Any, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    compilations = set()
    for n in (37, 64, 101):
        tensors = qkv(n, dtype)
        torch.manual_seed(1)
        expected = function(*tensors)
        torch.manual_seed(1)
        actual = compiled(*tensors)
        assert_close(actual, expected, dtype)
        assert_same_gradients(actual, expected, tensors, dtype)
        compilations.add(counter.frame_count)
    assert len(compilations) == 1  # no length compiled again
    if function is not DROPOUT:  # the compiler takes a module's float for a symbol at first, and starts over
        assert compilations == {1}


def test_compiles_with_masks_and_documents() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    q, k, v = qkv(40, b=1)
    for options in (
        {"key_mask": torch.rand(1, 40) > 0.3, "return_lse": True},
        {"cu_seqlens": torch.tensor([0, 7, 40]), "is_causal": True, "tail": "phantom"},
    ):
        got, want = compiled(q, k, v, **options), attention(q, k, v, **options)
        for a, b in zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]:
            assert_close(a, b, torch.float32)


def test_compiles_with_what_it_computes_as_arguments() -> None:
    """Numbers that change between calls, which compilers would make symbols of."""
    torch._dynamo.reset()
    compiled = torch.compile(dilated_attention, fullgraph=True, backend="aot_eager")
    tensors = qkv(40)
    for lengths, scale, size in (([8, 20], 0.3, 2**14), ([16, 40], 0.4, 2**16), ([5, 25], 0.5, 2**18)):
        execution = Execution("eager", size)
        for given in ((lengths, [1, 2]), (DilatedSpec(lengths, [1, 2], scale=scale),)):
            options = {"scale": scale, "execution": execution} if len(given) == 2 else {}
            expected = dilated_attention(*tensors, *given, **options)
            assert_close(compiled(*tensors, *given, **options), expected, torch.float32)


def test_compiles_with_segments_taken_from_the_shape() -> None:
    torch._dynamo.reset()

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dilated_attention(q, k, v, [q.shape[1]], [1])

    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    for n in (37, 64):
        tensors = qkv(n)
        assert_close(compiled(*tensors), whole(*tensors), torch.float32)


def test_export_round_trips_with_a_dynamic_length() -> None:
    module = DilatedAttention(SEGMENTS, RATES).eval()
    q, k, v = (x.detach() for x in qkv(37))
    n = torch.export.Dim("n", min=2, max=1 << 20)
    shapes = {"query": {1: n}, "key": {1: n}, "value": {1: n}}
    program = torch.export.export(module, (q, k, v), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for length in (37, 90):
        q, k, v = (x.detach() for x in qkv(length))
        assert torch.equal(loaded(q, k, v), module(q, k, v))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype, masked: bool) -> None:
    q, k, v = qkv(37, dtype, b=1)
    mask = torch.rand(1, 37) > 0.2 if masked else None
    documents = torch.tensor([0, 20, 37]) if masked else None
    torch.library.opcheck(attention_op, (q, k, v, mask, documents, *OPTIONS))
    strided = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(attention_op, (strided, k, v, None, None, *OPTIONS))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, dropout: float) -> None:
    check_checkpointing(attention, qkv(37), reentrant=reentrant, dropout=dropout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_like_sdpa(dtype: torch.dtype) -> None:
    check_autocast(attention, qkv(37), dtype)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"head_mixing": "grouped"}], ids=str)
def test_flop_counter_counts_the_true_work(options: dict[str, Any]) -> None:
    tensors = qkv(37)
    pairs = 2 * int(multiplicity(37, 6, SEGMENTS, RATES, **options).sum())
    with FlopCounterMode(display=False) as forward:
        out = attention(*tensors, **options)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 2 * 2 * 8 * pairs  # q k^T and p v
    assert backward.get_total_flops() == 5 * 2 * 8 * pairs  # scores again, and four gradients


def test_flop_counter_counts_what_detached_mixing_attends_again() -> None:
    tensors = qkv(37)
    out = attention(*tensors, detach_mixing=True)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    pairs = 2 * int(multiplicity(37, 6, SEGMENTS, RATES).sum())
    assert counter.get_total_flops() == (5 + 2) * 2 * 8 * pairs


def test_flop_counter_knows_documents() -> None:
    q, k, v = qkv(37, b=1)
    documents = torch.tensor([0, 5, 37])
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, cu_seqlens=documents)
    pairs = int(multiplicity(37, 6, SEGMENTS, RATES, cu_seqlens=documents).sum())
    assert counter.get_total_flops() == 2 * 2 * 8 * pairs


NESTED: tuple[Any, ...] = ((64, 128, 256), (1, 2, 4))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"cu_seqlens": torch.tensor([0, 99, 301])}])
@pytest.mark.parametrize("kernel", [*FUSED, "eager"])
def test_flop_counter_counts_the_pairs_that_the_kernel_scores(kernel: str, options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(1, 301, h, 8, requires_grad=True) for h in (4, 2, 2))
    counts = multiplicity(301, 4, *NESTED, **options)
    pairs = int((counts > 0 if kernel == "native" else counts).sum())
    with FlopCounterMode(display=False) as counter:
        out = dilated_attention(q, k, v, *NESTED, **options, execution=Execution(kernel))
        assert counter.get_total_flops() == 2 * 2 * 8 * pairs
        out.sum().backward()
    assert counter.get_total_flops() == (2 + 5) * 2 * 8 * pairs


def test_flops_of_detached_mixing_are_by_branch_in_backward() -> None:
    tensors = [torch.randn(1, 301, 4, 8, requires_grad=True) for _ in range(3)]
    counts = multiplicity(301, 4, *NESTED)
    scored, defined = int((counts > 0 if "native" in FUSED else counts).sum()), int(counts.sum())
    with FlopCounterMode(display=False) as counter:
        out = dilated_attention(*tensors, *NESTED, detach_mixing=True)
        assert counter.get_total_flops() == 2 * 2 * 8 * scored
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 8 * (2 * scored + 7 * defined)


def test_flops_of_meta_tensors_are_those_of_the_definition() -> None:
    tensors = [torch.empty(1, 301, 4, 8, device="meta") for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        dilated_attention(*tensors, *NESTED)
    assert counter.get_total_flops() == 2 * 2 * 8 * int(multiplicity(301, 4, *NESTED).sum())


def test_meta_tensors_have_shapes_only() -> None:
    q, k, v = (x.to("meta") for x in qkv(37, torch.bfloat16))
    out, lse = dilated_attention(q, k, v, SEGMENTS, RATES, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, "meta")
    assert (lse.shape, lse.dtype) == ((2, 6, 37), torch.float32)


def test_second_derivatives_raise() -> None:
    tensors = qkv(9)
    (grad,) = torch.autograd.grad(attention(*tensors).square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_only_the_needed_tensors_are_saved() -> None:
    saved: list[Tensor] = []
    q, k, v = qkv(37)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, lse = dilated_attention(q, k, v, SEGMENTS, RATES, return_lse=True)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (q, k, v, out, lse)}


def test_partial_and_missing_gradients() -> None:
    q, k, v = (x.detach() for x in qkv(37))
    out = attention(q, k.requires_grad_(), v)
    (dk,) = torch.autograd.grad(out.sum(), k)
    assert dk.shape == k.shape
    _, lse = dilated_attention(q, k, v, SEGMENTS, RATES, return_lse=True)
    lse.sum().backward()
    assert k.grad.isfinite().all()
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v), out)


def test_who_watches_the_dispatcher_sees_the_op_and_others_the_same_numbers() -> None:
    q, k, v = (torch.randn(1, 24, 2, 8) for _ in range(3))
    plain = dilated_attention(q, k, v, [8, 24], [1, 2])
    with torch.profiler.profile() as profile:
        profiled = dilated_attention(q, k, v, [8, 24], [1, 2])
    assert "dilated_attention_pytorch::attention" in {event.name for event in profile.events()}
    assert torch.equal(profiled, plain)
    lazily_negated = torch._neg_view(-q)
    assert lazily_negated.is_neg()
    assert torch.equal(dilated_attention(lazily_negated, k, v, [8, 24], [1, 2]), plain)
    zeros = torch._efficientzerotensor(q.shape)
    assert torch.equal(dilated_attention(zeros, k, v, [24], [1]), dilated_attention(0 * q, k, v, [24], [1]))
    with torch.inference_mode():
        assert torch.equal(dilated_attention(q.clone(), k, v, [8, 24], [1, 2]), plain)
    leaf = torch.nn.Parameter(q)
    assert dilated_attention(leaf, k, v, [8, 24], [1, 2]).grad_fn is not None
    with torch.no_grad():
        assert torch.equal(dilated_attention(leaf, k, v, [8, 24], [1, 2]), plain)
