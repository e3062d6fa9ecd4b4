"""The block-sparse ops under PyTorch's machinery: compile, export, opcheck, autocast, FLOPs, meta."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import BlockPattern, Execution, block_sparse_attention, build_block_pattern
from dilated_attention_pytorch.ops import (
    attention_backward_op,
    attention_op,
    block_spec,
    write_execution,
    write_recipe,
    write_spec,
)
from dilated_attention_pytorch.spec import SparsePatternConfig
from support.op_checks import check_autocast, check_checkpointing
from support.tolerances import assert_same_gradients

N, SIZE, BLOCKS = 37, 8, 5


def make_pattern(layouts: int = 1, seed: int = 0, *, is_causal: bool = False) -> BlockPattern:
    rng = torch.Generator().manual_seed(seed)
    layout = torch.rand(layouts, BLOCKS, BLOCKS, generator=rng) < 0.5
    return BlockPattern.from_layout(layout, N, SIZE, is_causal=is_causal)


def make_tiled(layouts: int = 1) -> BlockPattern:
    """A third of the pairs at random in half of the kept blocks, the others whole."""
    plain, rng = make_pattern(layouts, 5), torch.Generator().manual_seed(5)
    tile_of = torch.arange(len(plain.columns), dtype=torch.int32) % 6 - 3
    tiles = torch.rand(3, SIZE, SIZE, generator=rng) < 0.3
    return BlockPattern(N, SIZE, plain.starts, plain.columns, False, tiles, tile_of.clamp_min(-1))


PATTERN, TILED = make_pattern(), make_tiled()


def tables(pattern: BlockPattern) -> tuple[Tensor | None, ...]:
    return pattern.starts, pattern.columns, pattern.tiles, pattern.tile_of


def qkv(dtype: torch.dtype = torch.float32, b: int = 2) -> tuple[Tensor, ...]:
    return tuple(torch.randn(b, N, heads, 8, dtype=dtype, requires_grad=True) for heads in (6, 2, 2))


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return block_sparse_attention(q, k, v, PATTERN, **options)


def strings(
    recipe: str = PATTERN.key, size: int = SIZE, causal: bool = False, dropout_p: float = 0.0, **how: Any
) -> tuple[str, str]:
    """spec and execution of the op."""
    execution = Execution(**{"workspace_bytes": 2**16, "memory": "pool", **how})
    return write_spec("blocks", block_spec(causal, 0.3, dropout_p), recipe, size), write_execution(execution)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_compiles_once_for_a_pattern(causal: bool, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = partial(attention, is_causal=causal)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for _ in range(3):
        tensors = qkv(dtype)
        actual, expected = compiled(*tensors), function(*tensors)
        assert torch.equal(actual, expected)
        assert_same_gradients(actual, expected, tensors, dtype)
    assert counter.frame_count == 1


PATTERNS: list[tuple[BlockPattern, dict[str, Any]]] = [
    *((make_pattern(layouts, layouts), {"is_causal": x}) for layouts in (1, 6, 12) for x in (False, True)),
    (make_pattern(seed=4, is_causal=True), {"is_causal": True}),
]
OPTIONS = [
    (PATTERN, {"key_mask": torch.rand(2, N) > 0.3}),
    (PATTERN, {"dropout_p": 0.3, "scale": 0.2}),
    (TILED, {}),
    (make_tiled(6), {"is_causal": True}),
]


@pytest.mark.parametrize("calls", [PATTERNS, OPTIONS], ids=["patterns", "options"])
def test_compiles_with_patterns_and_options_as_arguments(
    calls: list[tuple[BlockPattern, dict[str, Any]]],
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(block_sparse_attention, fullgraph=True, backend="aot_eager")
    tensors = qkv()
    for pattern, options in calls:
        torch.manual_seed(1)
        expected = block_sparse_attention(*tensors, pattern, return_lse=True, **options)
        torch.manual_seed(1)
        actual = compiled(*tensors, pattern, return_lse=True, **options)
        assert all(torch.equal(got, want) for got, want in zip(actual, expected, strict=True))


class Sparse(torch.nn.Module):
    def __init__(self, pattern: BlockPattern) -> None:
        super().__init__()
        self.pattern = pattern

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q, k, v, self.pattern)


@pytest.mark.parametrize("pattern", [PATTERN, make_pattern(6), TILED], ids=["one", "heads", "tiles"])
def test_export_round_trips(pattern: BlockPattern) -> None:
    module = Sparse(pattern)
    tensors = tuple(x.detach() for x in qkv())
    program = torch.export.export(module, tensors)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    tensors = tuple(x.detach() for x in qkv())
    assert torch.equal(loaded(*tensors), module(*tensors))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype, masked: bool) -> None:
    q, k, v = qkv(dtype, b=1)
    mask = torch.rand(1, N) > 0.2 if masked else None
    pattern = TILED if masked else PATTERN
    rest = (mask, None, None, *tables(pattern))
    torch.library.opcheck(attention_op, (q, k, v, *rest, *strings(pattern.key)))
    strided = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    causal = strings(pattern.key, causal=True, memory="fresh", use_pattern_cache=False)
    torch.library.opcheck(attention_op, (strided, k, v, *rest, *causal))
    tensors = (*(x.detach() for x in (q, k, v)), *rest, *strings(pattern.key))
    out, lse = attention_op(*tensors)
    grad_lse = torch.randn_like(lse) if masked else None
    torch.library.opcheck(attention_backward_op, (torch.randn_like(out), grad_lse, out, lse, *tensors))


def test_opcheck_of_a_recipe_and_of_dropout() -> None:
    q, k, v = qkv(b=1)
    recipe = write_recipe(SparsePatternConfig("dilated_sparse", 0.4, SIZE), ((16, 1), (32, 2)))
    torch.library.opcheck(attention_op, (q, k, v, *(None,) * 7, *strings(recipe, 0)))
    dropout = (None, None, torch.tensor([7]), *tables(TILED), *strings(TILED.key, dropout_p=0.3))
    torch.library.opcheck(attention_op, (q, k, v, *dropout))


def test_a_recipe_is_the_pattern_that_it_describes() -> None:
    q, k, v = qkv()
    config = SparsePatternConfig("random", 0.4, SIZE, seed=3)
    pattern = build_block_pattern(config, N, 6)
    expected = block_sparse_attention(q, k, v, pattern, scale=0.3, execution=Execution(workspace_bytes=2**16))
    by_recipe = strings(write_recipe(config, ()), 0)
    out, _ = attention_op(q, k, v, *(None,) * 7, *by_recipe)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, dropout: float) -> None:
    check_checkpointing(attention, qkv(), reentrant=reentrant, dropout=dropout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_like_sdpa(dtype: torch.dtype) -> None:
    check_autocast(attention, qkv(), dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layouts", [1, 6, 12])
def test_flop_counter_counts_the_true_work(layouts: int, causal: bool) -> None:
    tensors, pattern = qkv(), make_pattern(layouts)
    seen = pattern.to_dense()
    pairs = int((seen.tril() if causal else seen).sum()) * 12 // layouts
    with FlopCounterMode(display=False) as forward:
        out = block_sparse_attention(*tensors, pattern, is_causal=causal)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 2 * 2 * 8 * pairs  # q k^T and p v
    assert backward.get_total_flops() == 5 * 2 * 8 * pairs  # scores again, and four gradients


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_meta_and_fake_tensors_have_shapes_only(kind: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else torch.device("meta"):
        q, k, v = qkv(torch.bfloat16)
        out, lse = attention(q, k, v, return_lse=True)
        out.sum().backward()
    assert (out.shape, out.dtype, out.device) == (q.shape, torch.bfloat16, q.device)
    assert (lse.shape, lse.dtype) == ((2, 6, N), torch.float32)
    assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)


def test_other_derivatives_are_refused_not_dropped() -> None:
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(TypeError, match="block_sparse_attention has no forward-mode derivative"):
        torch.func.jvp(lambda x: attention(x, k, v), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, torch.ones_like(v))
        with pytest.raises(TypeError, match="no forward-mode derivative"):
            attention(q, k, dual)
        assert attention(q, k, v).shape == q.shape
    tensors = qkv()
    (grad,) = torch.autograd.grad(attention(*tensors).square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_only_the_needed_tensors_are_saved() -> None:
    saved: list[Tensor] = []
    q, k, v = qkv()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, lse = attention(q, k, v, return_lse=True)
    needed = (q, k, v, out, lse, PATTERN.starts, PATTERN.columns)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in needed}


def test_partial_and_missing_gradients() -> None:
    q, k, v = (x.detach() for x in qkv())
    out = attention(q, k.requires_grad_(), v)
    (dk,) = torch.autograd.grad(out.sum(), k)
    assert dk.shape == k.shape
    _, lse = attention(q, k, v, return_lse=True)
    torch.where(lse.isfinite(), lse, 0.0).sum().backward()
    assert k.grad.isfinite().all()
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v), out)


def test_dropout_ignores_the_default_device() -> None:
    tensors = qkv()
    torch.manual_seed(9)
    expected = attention(*tensors, dropout_p=0.2)
    torch.manual_seed(9)
    with torch.device("meta"):
        assert torch.equal(attention(*tensors, dropout_p=0.2), expected)


def test_calling_the_op_directly_is_validated_too() -> None:
    q, k, v = (x.detach() for x in qkv())
    changed = strings(use_pattern_cache=False)
    wrong = torch.full_like(PATTERN.columns, 9)
    with pytest.raises(ValueError, match="columns must lie in 0 to 4, got 9 to 9"):
        attention_op(q, k, v, None, None, None, PATTERN.starts, wrong, None, None, *changed)
    with pytest.raises(ValueError, match="starts must have one entry a row"):
        attention_op(q, k, v, None, None, None, PATTERN.starts[:-1], *tables(PATTERN)[1:], *changed)
    with pytest.raises(TypeError, match=r"tiles must be a 3-d torch\.bool tensor on the cpu, got None"):
        attention_op(q, k, v, None, None, None, *tables(TILED)[:2], None, TILED.tile_of, *changed)
