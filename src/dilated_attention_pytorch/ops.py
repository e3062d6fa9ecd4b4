"""The pair of torch ops behind all attention in one process, known to autograd and compilers.

    attention(tensors, spec, execution) -> (out, lse)
    attention_backward(grad_out, grad_lse, out, lse, tensors, spec, execution) -> (dq, dk, dv)

The tensors are q, k, v, key_mask, cu_seqlens, seed and, of a block pattern that is given, its tables.
`spec` and `execution` are strings, so that compilers can guard on them and exported programs keep them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple
from functools import lru_cache, partial
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from .checks import autocasts, document_bounds
from .core import process
from .core.attention_buffer_manager import check_memory, run_with_memory
from .core.pattern_cache import PatternCache, get_block_pattern_cache, get_global_pattern_cache
from .core.tracing import remembered
from .core.workspace import Workspace
from .kernels import Inputs, Kernel, Merged, Request, choose_kernel
from .plan import (
    BYTES_A_THREAD,
    DEFAULT_WORKSPACE_BYTES,
    UNBOUNDED,
    BlockPattern,
    Pass,
    Plan,
    Shape,
    Shard,
    build_pattern,
    once_pays,
    plan_blocks,
    plan_dilated,
    plan_once,
)
from .spec import SPEC_FIELDS, DilatedSpec, Execution, SparsePatternConfig

MOST_GPU_BYTES = 2 * 2**30  # of the default workspace of a GPU
_FRESH = Execution()


class RunOptions(NamedTuple):
    """What the engines know of a call: factor of the scores, dropout, and an `Execution` without None."""

    scale: float
    dropout_p: float
    detaches: bool
    kernel: str
    workspace_bytes: int
    memory: str
    use_pattern_cache: bool


def run_options(spec: DilatedSpec, d: int, execution: Execution, default_bytes: int) -> RunOptions:
    """The options of a call with heads of d features."""
    size = execution.workspace_bytes or default_bytes
    how = execution.kernel, size, execution.memory, execution.use_pattern_cache
    return RunOptions(spec.scale_for(d), spec.dropout_p, spec.detach_mixing, *how)


def check_execution(execution: Execution | None) -> Execution:
    """The execution, or the default one; raises where its memory does not exist."""
    if execution is None:
        return _FRESH
    if not isinstance(execution, Execution):
        raise TypeError(f"execution must be an Execution or None, got {type(execution).__name__}")
    check_memory(execution.memory)
    return execution


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Keeps autocast, which acts on what the caller passes in, from lowering the precision inside."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


class Tensors(NamedTuple):
    """The tensors of a call, in the order of the schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    seed: Tensor | None = None
    starts: Tensor | None = None
    columns: Tensor | None = None
    tiles: Tensor | None = None
    tile_of: Tensor | None = None

    @property
    def shape(self) -> Shape:
        return Shape.of(self.q, self.k)


# Of the tensors of a call without a block pattern.
NO_TABLES: tuple[Tensor | None, ...] = (None,) * 4


Work = tuple[int, int]  # query rows that branches meet, and pairs of a query and a key


def attention_inputs(
    options: RunOptions, tensors: Tensors, workspace: Workspace, streams: bool = False, work: Work = (0, 0)
) -> tuple[Kernel, Inputs]:
    """The kernel that runs a call, and what it takes besides a plan; `streams`, `work`: see `Request`."""
    q, k, v, key_mask, _, seed, *_ = tensors
    kernel = _kernel_of(options, tensors, streams, work)
    drawn = 0 if seed is None else int(seed.item())
    return kernel, Inputs(q, k, v, key_mask, options.scale, options.dropout_p, drawn, workspace)


def _kernel_of(options: RunOptions, tensors: Tensors, streams: bool = False, work: Work = (0, 0)) -> Kernel:
    q, facts = tensors.q, (tensors.key_mask is not None, options.dropout_p > 0, options.scale)
    request = Request(q.device, q.dtype, *facts, q.shape[-1], *work, streams, tensors.tiles is not None)
    return choose_kernel(request, options.kernel)


@lru_cache(maxsize=64)
def _gpu_bytes(device: torch.device) -> int | None:
    """The default workspace of a GPU, where no batch stays in a cache, and each costs launches."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return min(MOST_GPU_BYTES, torch.cuda.get_device_properties(device).total_memory // 16)


class Dilated(NamedTuple):
    """Dilated attention; `steps` and `head_slice` as in `functional.attend`."""

    spec: DilatedSpec
    steps: int = 1
    head_slice: tuple[int, ...] = ()

    def default_bytes(self, device: torch.device) -> int:
        return _gpu_bytes(device) or DEFAULT_WORKSPACE_BYTES

    def amount(self, tensors: Tensors) -> Work:
        """About how many query rows and pairs branches meet."""
        b, n, h, *_ = tensors.shape
        heads = h / len(self.spec.branches) if self.spec.head_mixing == "grouped" else h
        rows = [(b * heads * n / rate, min(length, n) / rate) for length, rate in self.spec.branches]
        pairs = sum(row * keys for row, keys in rows) / (2 if self.spec.is_causal else 1)
        return int(sum(row for row, _ in rows)), int(pairs)

    def is_joint(self, tensors: Tensors) -> bool:
        """Whether all branches of a query can be one job."""
        return once_pays(self.spec, tensors.shape, self._documents(tensors))

    def _documents(self, tensors: Tensors) -> tuple[int, ...] | None:
        bounds = tensors.cu_seqlens
        return None if bounds is None else document_bounds(bounds, tensors.q.shape[1])

    def plan(self, options: RunOptions, tensors: Tensors, direction: Pass, once: bool = False) -> Plan:
        """The jobs of a call; `once`: all branches of a query in one of them."""
        shape, docs = tensors.shape, self._documents(tensors)
        first, total = self.head_slice or (0, shape.h)
        cache = get_global_pattern_cache() if options.use_pattern_cache else None
        shard = Shard(shape.n, 0, total, first)
        if once:
            return plan_once(self.spec, shape, docs, shard, cache)
        return plan_dilated(
            self.spec,
            shape,
            itemsize=tensors.q.element_size(),
            direction=direction,
            docs=docs,
            workspace_bytes=options.workspace_bytes,
            cache=cache,
            steps=self.steps,
            shard=shard,
        )


class BlockSparse(NamedTuple):
    """Block-sparse attention; of `spec` is_causal, scale and dropout_p count.

    The pattern is either built from a recipe, or given by tensors; then `recipe` is the pattern's key, under
    which its plan is cached, or empty if it is not worth keeping.
    """

    spec: DilatedSpec
    recipe: str
    block_size: int = 0

    def default_bytes(self, device: torch.device) -> int:
        # Known only where the op runs: compilers cannot ask for threads.
        return _gpu_bytes(device) or BYTES_A_THREAD * torch.get_num_threads()

    def amount(self, _tensors: Tensors) -> Work:
        return 0, 0  # only a kernel that takes many short runs at once is of use

    def is_joint(self, _tensors: Tensors) -> bool:
        return True

    def plan(self, options: RunOptions, tensors: Tensors, direction: Pass, once: bool = False) -> Plan:
        shape, size = tensors.shape, options.workspace_bytes
        facts: dict[str, Any] = {"itemsize": tensors.q.element_size(), "direction": direction}
        facts |= {"workspace_bytes": size, "joins": not once and size < UNBOUNDED}
        build = partial(plan_blocks, self.pattern(options, tensors), shape, **facts)
        key = ("blocks", self.recipe, self.spec.is_causal, shape, *facts.values())
        plan: Plan = self._kept(get_global_pattern_cache, options, key, build)
        return plan

    def pattern(self, options: RunOptions | Execution, tensors: Tensors) -> BlockPattern:
        """The pattern of a call, kept in the cache of block patterns."""
        _, n, num_heads, _, _ = tensors.shape
        build = partial(self._build, n, num_heads, tensors)
        # The same pattern may serve any number of heads, but not the draws of a random one.
        key = ("block_sparse", self.recipe, n, num_heads, self.spec.is_causal)
        pattern: BlockPattern = self._kept(get_block_pattern_cache, options, key, build)
        return pattern

    def _kept(self, cache: Callable[[], PatternCache], options: Any, key: Any, build: Any) -> Any:
        keeps = options.use_pattern_cache and self.recipe
        return cache().get_or_build(key, build) if keeps else build()

    def _build(self, n: int, num_heads: int, tensors: Tensors) -> BlockPattern:
        is_causal = self.spec.is_causal
        starts, columns, *tiled = (None if x is None else x.cpu() for x in tensors[6:])
        if starts is not None and columns is not None:
            pattern = BlockPattern(n, self.block_size, starts, columns, False, *tiled)
            return pattern.causal() if is_causal else pattern
        config, branches = _read_recipe(self.recipe)
        return build_pattern(config, n, num_heads, is_causal=is_causal, branches=branches)


def block_spec(is_causal: bool, scale: float | None, dropout_p: float) -> DilatedSpec:
    """What block-sparse attention has in common with dilated attention, checked."""
    return DilatedSpec((1,), (1,), is_causal, scale, dropout_p)


def write_recipe(config: SparsePatternConfig, branches: Sequence[tuple[int, int]]) -> str:
    """A config and its branches as a string."""
    return repr((astuple(config), tuple(branches)))


def _literals(text: str) -> Any:
    with process.LOCK:  # Python 3.11 counts the depth of all threads that parse together, and fails
        return ast.literal_eval(text)


@lru_cache(maxsize=256)
def _read_recipe(recipe: str) -> tuple[SparsePatternConfig, tuple[tuple[int, int], ...]]:
    config, branches = _literals(recipe)
    return SparsePatternConfig(*config), branches


@remembered
def write_spec(kind: str, spec: DilatedSpec, *rest: Any) -> str:
    """The `spec` of the ops, as Python literals: of "dilated" or "blocks", with the rest of its fields."""
    values = [index(x) if isinstance(x, int) else x for x in rest]  # symbols of compilers become numbers
    return repr((kind, tuple([getattr(spec, name) for name in SPEC_FIELDS]), *values))


@remembered
def write_execution(execution: Execution) -> str:
    """The `execution` of the ops, as Python literals."""
    size = execution.workspace_bytes
    size = None if size is None else index(size)  # a symbol of compilers becomes a number
    return repr((execution.kernel, size, execution.memory, execution.use_pattern_cache))


@lru_cache(maxsize=1024)
def _read(spec: str, execution: str) -> tuple[Dilated | BlockSparse, Execution]:
    kind, fields, *rest = _literals(spec)
    work = (Dilated if kind == "dilated" else BlockSparse)(DilatedSpec(*fields), *rest)
    return work, Execution(*_literals(execution))


_NUM_TENSORS = len(Tensors._fields)
_ARGUMENTS = ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in Tensors._fields)
_ARGUMENTS += ", str spec, str execution"
# Of the package, or of the name under which a copy of it is loaded beside it: both register their ops.
_NAMESPACE = __name__.partition(".")[0]
# `torch.library.custom_op` would cost twice as much a call.
_LIBRARY: Any = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"attention({_ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.define(
    f"attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_ARGUMENTS})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=torch.Tag.pt2_compliant_tag,
)
_OPS = getattr(torch.ops, _NAMESPACE)
attention_op, attention_backward_op = _OPS.attention.default, _OPS.attention_backward.default


def _backward(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> Any:
    return _run(args, Merged(out, lse, grad_out, grad_lse))


def _run(args: tuple[Any, ...], merged: Merged | None = None) -> Any:
    tensors, work, options = _read_call(args)
    direction: Pass = "forward" if merged is None else "backward"
    device = tensors.q.device

    def attend(workspace_bytes: int, workspace: Workspace) -> Any:
        resized = workspace_bytes != options.workspace_bytes
        sized = options._replace(workspace_bytes=workspace_bytes) if resized else options
        amount = work.amount(tensors) if device.type == "cuda" else (0, 0)
        kernel, inputs = attention_inputs(sized, tensors, workspace, False, amount)
        once = _is_once(kernel, work, options, tensors, direction)
        sized = sized if kernel.packs else sized._replace(workspace_bytes=UNBOUNDED)
        plan = work.plan(sized, tensors, direction, once)
        return kernel.forward(plan, inputs) if merged is None else kernel.backward(plan, inputs, merged)

    with without_autocast(device):
        return run_with_memory(options.memory, options.workspace_bytes, device, attend)


def _is_once(
    kernel: Kernel, work: Dilated | BlockSparse, options: RunOptions, tensors: Tensors, direction: Pass
) -> bool:
    """Whether all branches of a query are one job: not if backward needs the outputs of each."""
    needs_each = options.detaches and direction == "backward"
    return kernel.each_key_once and not needs_each and work.is_joint(tensors)


def _read_call(args: tuple[Any, ...]) -> tuple[Tensors, Dilated | BlockSparse, RunOptions]:
    tensors, (work, execution) = Tensors(*args[:_NUM_TENSORS]), _read(*args[_NUM_TENSORS:])
    q = tensors.q
    return tensors, work, run_options(work.spec, q.shape[-1], execution, work.default_bytes(q.device))


def _fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, n, h, _d = q.shape
    lse = q.new_empty((b, h, n), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in args[4:7])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = attention_op(*args)
        ctx.save_for_backward(*args[:_NUM_TENSORS], out, lse)
        ctx.strings = args[_NUM_TENSORS:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        others = (None,) * (_NUM_TENSORS - 3 + len(ctx.strings))
        if grad_out is None and grad_lse is None:
            return None, None, None, *others
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        return *attention_backward_op(grad_out, grad_lse, out, lse, *tensors, *ctx.strings), *others


def _autograd(*args: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in args[:3]):
        result: tuple[Tensor, Tensor] = _Attention.apply(*args)  # type: ignore[no-untyped-call]
        return result
    with torch._C._AutoDispatchBelowAutograd():
        result = attention_op(*args)
    return result


def attention(*args: Any) -> tuple[Tensor, Tensor]:
    """The op, or what it does at once where nobody watches the dispatcher: a sixth of a short call."""
    result: tuple[Tensor, Tensor] = _run(args) if _is_unwatched(*args[:3]) else attention_op(*args)
    return result


def _keys_of(x: Tensor) -> int:
    """What the dispatcher would act on: gradients, subclasses, lazy negation, wrappers of transforms."""
    keys: int = torch._C._dispatch_keys(x).raw_repr()
    return keys


_PLAIN = {_keys_of(torch.empty(0, device="cpu"))}
with torch.inference_mode():
    _PLAIN.add(_keys_of(torch.empty(0, device="cpu")))


def _is_unwatched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Plain CPU tensors without a gradient, and no compiler, tracer, mode, transform or profiler at work."""
    if torch.compiler.is_compiling() or not {_keys_of(q), _keys_of(k), _keys_of(v)} <= _PLAIN:
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._is_torch_function_mode_enabled():
        return False
    level, state = torch._C._functorch.maybe_current_level(), torch._C._get_tracing_state()
    return level is None and state is None and not torch._C._autograd._profiler_enabled()


_LIBRARY.impl("attention", lambda *args: _run(args), "CompositeExplicitAutograd")
_LIBRARY.impl("attention", _autograd, "Autograd")
_LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake(f"{_NAMESPACE}::attention", _fake, lib=_LIBRARY)
torch.library.register_fake(f"{_NAMESPACE}::attention_backward", _fake_backward, lib=_LIBRARY)


def _flops(direction: Pass, args: tuple[Any, ...]) -> int:
    """Of the matrix products, 2 forward and 5 backward; with `detach_mixing` backward attends again.

    Counted are the pairs that the kernel scores: only on a CPU may they be fewer than the definition's.
    """
    tensors, work, options = _read_call(args)
    matmuls = 2 if direction == "forward" else 7 if work.spec.detach_mixing else 5
    once = False
    if tensors.q.device.type == "cpu":
        once = _is_once(_kernel_of(options, tensors), work, options, tensors, direction)
    return 2 * matmuls * work.plan(options, tensors, direction, once).num_pairs * tensors.q.shape[-1]


register_flop_formula(_OPS.attention, get_raw=True)(lambda *args, **_: _flops("forward", args))
# The gradients, out and lse come first.
register_flop_formula(_OPS.attention_backward, get_raw=True)(lambda *args, **_: _flops("backward", args[4:]))
