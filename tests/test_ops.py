"""The ops under PyTorch's machinery: compile, export, opcheck, checkpointing, autocast, FLOPs, meta."""

from __future__ import annotations

import io
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import (
    BlockPattern,
    DilatedAttention,
    DilatedSpec,
    Execution,
    SparsePatternConfig,
    block_sparse_attention,
    build_block_pattern,
    dilated_attention,
)
from dilated_attention_pytorch.ops import (
    attention_backward_op,
    attention_op,
    block_spec,
    write_execution,
    write_recipe,
    write_spec,
)
from dilated_attention_pytorch.reference import multiplicity
from support.executions import FUSED
from support.tolerances import assert_close, assert_same_gradients

N, SIZE, BLOCKS = 37, 8, 5
SEGMENTS, RATES = (8, 14, 40), (1, 2, 5)
NESTED: tuple[Any, ...] = ((64, 128, 256), (1, 2, 4))
DROPOUT = DilatedAttention(SEGMENTS, RATES, attention_dropout=0.2)
POOL = Execution("auto", 2**16, "pool")


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


def qkv(n: int = N, dtype: torch.dtype = torch.float32, b: int = 2) -> tuple[Tensor, ...]:
    return tuple(torch.randn(b, n, heads, 8, dtype=dtype, requires_grad=True) for heads in (6, 2, 2))


def dilated(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return dilated_attention(q, k, v, SEGMENTS, RATES, **options)


def blocks(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return block_sparse_attention(q, k, v, PATTERN, **options)


EACH = pytest.mark.parametrize("attention", [dilated, blocks])


def block_strings(
    recipe: str = PATTERN.key, size: int = SIZE, causal: bool = False, p: float = 0.0, how: Execution = POOL
) -> tuple[str, str]:
    """spec and execution of the op."""
    return write_spec("blocks", block_spec(causal, 0.3, p), recipe, size), write_execution(how)


@pytest.mark.parametrize(
    "function",
    [dilated, DilatedAttention(SEGMENTS, RATES), DROPOUT, blocks, partial(blocks, is_causal=True)],
    ids=["function", "module", "dropout", "blocks", "causal blocks"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_once_for_all_lengths(function: Any, dtype: torch.dtype) -> None:
    """A pattern has one length: for it alone."""
    torch._dynamo.reset()
    has_lengths = function is not blocks and not isinstance(function, partial)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=has_lengths or None, backend=counter)
    compilations = set()
    for n in (37, 64, 101) if has_lengths else (N, N, N):
        tensors = qkv(n, dtype)
        torch.manual_seed(1)
        expected = function(*tensors)
        torch.manual_seed(1)
        actual = compiled(*tensors)
        assert has_lengths or torch.equal(actual, expected)
        assert_close(actual, expected, dtype)
        assert_same_gradients(actual, expected, tensors, dtype)
        compilations.add(counter.frame_count)
    assert len(compilations) == 1  # no length compiled again
    if function is not DROPOUT:  # the compiler takes a module's float for a symbol at first, and starts over
        assert compilations == {1}


def branches_from_the_shape(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dilated_attention(q, k, v, [q.shape[1]], [1])


Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]
MASK = torch.rand(2, N, generator=torch.Generator().manual_seed(0)) > 0.3
# Numbers that change between calls, which compilers would make symbols of.
COMPUTED: Calls = []
for lengths, scale, size in (([8, 20], 0.3, 2**14), ([16, 40], 0.4, 2**16), ([5, 25], 0.5, 2**18)):
    COMPUTED += [((lengths, [1, 2]), {"scale": scale, "execution": Execution("eager", size)})]
    COMPUTED += [((DilatedSpec(lengths, [1, 2], scale=scale),), {})]
PATTERNS: Calls = [
    *(((make_pattern(layouts, layouts),), {"is_causal": x}) for layouts in (1, 6, 12) for x in (False, True)),
    ((make_pattern(seed=4, is_causal=True),), {"is_causal": True}),
]
BLOCK_OPTIONS: Calls = [
    ((PATTERN,), {"key_mask": MASK, "return_lse": True}),
    ((PATTERN,), {"dropout_p": 0.3, "scale": 0.2}),
    ((TILED,), {}),
    ((make_tiled(6),), {"is_causal": True}),
]
OPTIONS: Calls = [
    ((), {"key_mask": MASK[:1], "return_lse": True}),
    ((), {"cu_seqlens": torch.tensor([0, 7, N]), "is_causal": True, "tail": "phantom"}),
]


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (dilated, OPTIONS),
        (dilated_attention, COMPUTED),
        (block_sparse_attention, PATTERNS),
        (block_sparse_attention, BLOCK_OPTIONS),
    ],
    ids=["options", "computed", "patterns", "options of patterns"],
)
def test_compiles_with_what_changes_between_calls(function: Any, calls: Calls) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    tensors = qkv(b=1 if calls is OPTIONS else 2)  # documents are packed into one batch
    for args, options in calls:
        torch.manual_seed(1)
        expected = function(*tensors, *args, **options)
        torch.manual_seed(1)
        actual = compiled(*tensors, *args, **options)
        for got, want in zip(*([x] if isinstance(x, Tensor) else x for x in (actual, expected)), strict=True):
            assert function is not block_sparse_attention or torch.equal(got, want)
            assert_close(got, want, torch.float32)


def test_compiles_with_segments_taken_from_the_shape() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(branches_from_the_shape, fullgraph=True, backend="aot_eager")
    for n in (37, 64):
        tensors = qkv(n)
        assert_close(compiled(*tensors), branches_from_the_shape(*tensors), torch.float32)


class Sparse(nn.Module):
    def __init__(self, pattern: BlockPattern) -> None:
        super().__init__()
        self.pattern = pattern

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return block_sparse_attention(query, key, value, self.pattern)


@pytest.mark.parametrize(
    ("module", "lengths"),
    [
        (DilatedAttention(SEGMENTS, RATES).eval(), (N, 90)),
        *((Sparse(pattern), (N,)) for pattern in (PATTERN, make_pattern(6), TILED)),
    ],
    ids=["dilated", "one layout", "heads", "tiles"],
)
def test_export_round_trips(module: nn.Module, lengths: tuple[int, ...]) -> None:
    shapes = None
    if len(lengths) > 1:
        n = torch.export.Dim("n", min=2, max=1 << 20)
        shapes = {"query": {1: n}, "key": {1: n}, "value": {1: n}}
    program = torch.export.export(module, tuple(x.detach() for x in qkv()), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for length in lengths:
        tensors = [x.detach() for x in qkv(length)]
        assert torch.equal(loaded(*tensors), module(*tensors))


SPEC = write_spec("dilated", DilatedSpec(SEGMENTS, RATES, True, 0.3), 1, ())
DOCUMENTS = torch.tensor([0, 20, N])
RECIPE = write_recipe(SparsePatternConfig("dilated_sparse", 0.4, SIZE), ((16, 1), (32, 2)))
FRESH = Execution(memory="fresh", use_pattern_cache=False)


class OpCall(NamedTuple):
    """What the op takes after q, k and v: mask, documents, seed, four tables, spec and execution."""

    rest: tuple[Any, ...]
    has_lse_gradient: bool = False


OP_CALLS = {
    "dilated": OpCall((*(None,) * 7, SPEC, write_execution(POOL))),
    "documents": OpCall((MASK[:1], DOCUMENTS, *(None,) * 5, SPEC, write_execution(POOL)), True),
    "blocks": OpCall((None, None, None, *tables(PATTERN), *block_strings())),
    "causal blocks": OpCall((None, None, None, *tables(PATTERN), *block_strings(causal=True, how=FRESH))),
    "tiles": OpCall((MASK[:1], None, None, *tables(TILED), *block_strings(TILED.key)), True),
    "recipe": OpCall((*(None,) * 7, *block_strings(RECIPE, 0))),
    "dropout": OpCall((None, None, torch.tensor([7]), *tables(TILED), *block_strings(TILED.key, p=0.3))),
}


@pytest.mark.parametrize("name", OP_CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype, name: str) -> None:
    (q, k, v), (rest, has_lse_gradient) = qkv(dtype=dtype, b=1), OP_CALLS[name]
    torch.library.opcheck(attention_op, (q, k, v, *rest))
    strided = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(attention_op, (strided, k, v, *rest))
    tensors = (*(x.detach() for x in (q, k, v)), *rest)
    out, lse = attention_op(*tensors)
    grad_lse = torch.randn_like(lse) if has_lse_gradient else None
    torch.library.opcheck(attention_backward_op, (torch.randn_like(out), grad_lse, out, lse, *tensors))


def test_a_recipe_is_the_pattern_that_it_describes() -> None:
    q, k, v = qkv()
    config = SparsePatternConfig("random", 0.4, SIZE, seed=3)
    pattern = build_block_pattern(config, N, 6)
    expected = block_sparse_attention(q, k, v, pattern, scale=0.3, execution=Execution(workspace_bytes=2**16))
    out, _ = attention_op(q, k, v, *(None,) * 7, *block_strings(write_recipe(config, ()), 0))
    assert torch.equal(out, expected)


@EACH
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(attention: Any, reentrant: bool, dropout: float) -> None:
    tensors = qkv()
    torch.manual_seed(2)
    expected = torch.autograd.grad(attention(*tensors, dropout_p=dropout).square().sum(), tensors)
    torch.manual_seed(2)
    out = checkpoint(lambda *x: attention(*x, dropout_p=dropout), *tensors, use_reentrant=reentrant)
    out.square().sum().backward()
    for x, want in zip(tensors, expected, strict=True):
        assert torch.equal(x.grad, want)


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_like_sdpa(attention: Any, dtype: torch.dtype) -> None:
    """And leaves float64; gradients are those of float32 inputs."""
    tensors = q, k, v = qkv()
    with torch.autocast("cpu", dtype=dtype):
        out = attention(q, k.to(dtype), v)
        kept = attention(q.double(), k.double(), v.double())
    assert (out.dtype, kept.dtype) == (dtype, torch.float64)
    assert torch.equal(out, attention(q.to(dtype), k.to(dtype), v.to(dtype)))
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), tensors))


@EACH
@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_autocast_does_not_lower_the_precision_inside(attention: Any, kernel: str) -> None:
    tensors = qkv(dtype=torch.bfloat16)

    def run() -> list[Tensor]:
        out, lse = attention(*tensors, execution=Execution(kernel), return_lse=True)
        loss = out.square().sum() + torch.where(lse.isfinite(), lse, 0.0).sin().sum()
        return [out, lse, *torch.autograd.grad(loss, tensors)]

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run()
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def counted(attention: Any, tensors: Any, *args: Any, **options: Any) -> tuple[int, int]:
    """FLOPs of a call and of its backward pass, in products of a pair of rows of 8 features."""
    with FlopCounterMode(display=False) as forward:
        out = attention(*tensors, *args, **options)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops() // 16, backward.get_total_flops() // 16


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"head_mixing": "grouped"}, {"cu_seqlens": torch.tensor([0, 5, N])}],
    ids=lambda x: ",".join(x),
)
def test_flops_are_the_true_work(options: dict[str, Any]) -> None:
    pairs = int(multiplicity(N, 6, SEGMENTS, RATES, **options).sum())
    # q k^T and p v; scores again, and four gradients
    assert counted(dilated, qkv(b=1), **options) == (2 * pairs, 5 * pairs)
    if "cu_seqlens" not in options:
        assert counted(dilated, qkv(), detach_mixing=True, **options)[1] == 2 * 7 * pairs  # attends again


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layouts", [1, 6, 12])
def test_flops_of_blocks_are_the_true_work(layouts: int, causal: bool) -> None:
    pattern = make_pattern(layouts)
    seen = pattern.to_dense()
    pairs = int((seen.tril() if causal else seen).sum()) * 12 // layouts
    assert counted(block_sparse_attention, qkv(), pattern, is_causal=causal) == (2 * pairs, 5 * pairs)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"cu_seqlens": torch.tensor([0, 99, 301])}])
@pytest.mark.parametrize("kernel", [*FUSED, "eager"])
def test_flops_count_the_pairs_that_the_kernel_scores(kernel: str, options: dict[str, Any]) -> None:
    counts = multiplicity(301, 6, *NESTED, **options)
    scored, defined = int((counts > 0 if kernel == "native" else counts).sum()), int(counts.sum())
    tensors, how = qkv(301, b=1), {**options, "execution": Execution(kernel)}
    assert counted(dilated_attention, tensors, *NESTED, **how) == (2 * scored, 5 * scored)
    of_branches = counted(dilated_attention, tensors, *NESTED, **how, detach_mixing=True)
    assert of_branches == (2 * scored, 7 * defined)  # backward needs the output of each


def test_flops_of_meta_tensors_are_those_of_the_definition() -> None:
    tensors = [torch.empty(1, 301, 4, 8, device="meta", requires_grad=True) for _ in range(3)]
    pairs = int(multiplicity(301, 4, *NESTED).sum())
    assert counted(dilated_attention, tensors, *NESTED) == (2 * pairs, 5 * pairs)


@EACH
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_meta_and_fake_tensors_have_shapes_only(attention: Any, kind: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else torch.device("meta"):
        q, k, v = qkv(dtype=torch.bfloat16)
        out, lse = attention(q, k, v, return_lse=True)
        out.sum().backward()
    assert (out.shape, out.dtype, out.device) == (q.shape, torch.bfloat16, q.device)
    assert (lse.shape, lse.dtype) == ((2, 6, N), torch.float32)
    assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)


@EACH
def test_other_derivatives_are_refused_not_dropped(attention: Any) -> None:
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(TypeError, match="attention has no forward-mode derivative"):
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


@EACH
def test_only_the_needed_tensors_are_saved(attention: Any) -> None:
    saved: list[Tensor] = []
    q, k, v = qkv()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, lse = attention(q, k, v, return_lse=True)
    needed = (q, k, v, out, lse, *(tables(PATTERN)[:2] if attention is blocks else ()))
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in needed}


@EACH
def test_partial_and_missing_gradients(attention: Any) -> None:
    q, k, v = (x.detach() for x in qkv())
    out = attention(q, k.requires_grad_(), v)
    (dk,) = torch.autograd.grad(out.sum(), k)
    assert dk.shape == k.shape
    _, lse = attention(q, k, v, return_lse=True)
    torch.where(lse.isfinite(), lse, 0.0).sum().backward()
    assert k.grad.isfinite().all()
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v), out)


@EACH
def test_dropout_ignores_the_default_device(attention: Any) -> None:
    tensors = qkv()
    torch.manual_seed(9)
    expected = attention(*tensors, dropout_p=0.2)
    torch.manual_seed(9)
    with torch.device("meta"):
        assert torch.equal(attention(*tensors, dropout_p=0.2), expected)


def test_calling_the_op_directly_is_validated_too() -> None:
    tensors, changed = [x.detach() for x in qkv()], block_strings(how=FRESH)
    starts, columns, *_ = tables(PATTERN)
    wrong = torch.full_like(PATTERN.columns, 9)
    for given, strings, error, message in (
        ((starts, wrong, None, None), changed, ValueError, "columns must lie in 0 to 4, got 9 to 9"),
        ((PATTERN.starts[:-1], columns, None, None), changed, ValueError, "starts must have one entry a row"),
        (
            (*tables(TILED)[:2], None, TILED.tile_of),
            changed,
            TypeError,
            r"tiles must be a 3-d torch\.bool tensor on the cpu, got None",
        ),
        (
            (None,) * 4,
            (SPEC.replace("(8, 14", "(0, 14"), write_execution(POOL)),
            ValueError,
            "segment_lengths must be positive",
        ),
    ):
        with pytest.raises(error, match=message):
            attention_op(*tensors, None, None, None, *given, *strings)


def test_who_watches_the_dispatcher_sees_the_op_and_others_the_same_numbers() -> None:
    q, k, v = (torch.randn(1, 24, 2, 8) for _ in range(3))
    attend = partial(dilated_attention, segment_lengths=[8, 24], dilation_rates=[1, 2])
    plain = attend(q, k, v)
    with torch.profiler.profile() as profile:
        profiled = attend(q, k, v)
    assert "dilated_attention_pytorch::attention" in {event.name for event in profile.events()}
    assert torch.equal(profiled, plain)
    lazily_negated = torch._neg_view(-q)
    assert lazily_negated.is_neg()
    assert torch.equal(attend(lazily_negated, k, v), plain)
    assert torch.equal(attend(torch._efficientzerotensor(q.shape), k, v), attend(0 * q, k, v))
    with torch.inference_mode():
        assert torch.equal(attend(q.clone(), k, v), plain)
    leaf = nn.Parameter(q)
    assert attend(leaf, k, v).grad_fn is not None
    with torch.no_grad():
        assert torch.equal(attend(leaf, k, v), plain)
