"""`gpu-check`: everything that a first day with a GPU should tell, and a report of it."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..block_sparse import block_sparse_attention, build_block_pattern
from ..decode import attend_last
from ..functional import dilated_attention
from ..kernels import Kernel, Request, kernels_for
from ..kernels.triton import interprets
from ..reference import block_sparse_attention_reference, dilated_attention_reference
from ..spec import Execution, SparsePatternConfig, branches_for
from .bench import gate
from .bench.exactness import CONFIGURATIONS, HEADS, LENGTH, Check
from .doctor import checks_as_dicts, collect_facts, compare, mark, show_checks
from .text import paint, show_bytes, show_seconds

DTYPES = ("float16", "bfloat16", "float32")
HEAD_DIMS = (64, 40, 128)
QUICK = ("grouped-query heads",)
TIMED_HEADS, TIMED_HEAD_DIM = 16, 64
ROUNDS = 20
_T = TypeVar("_T")


def run(options: Namespace) -> int:
    """Checks, repeats and times; 1 if anything is wrong, 2 where there is nothing to check on."""
    device = choose_gpu("gpu-check", options.device)
    report: dict[str, Any] = {"facts": collect_facts(), "device": str(device)}
    checks = show_checks(_checks(device, options.quick))
    report["checks"] = checks_as_dicts(checks)
    report["repeats"] = _repeats(device, 2048 if device.type == "cuda" else 64)
    print(f"  {mark(report['repeats'])} the same bits twice")
    if device.type == "cuda":
        report["times"] = list(_times(device, options.quick))
    else:
        print("  nothing is timed without a GPU")
    options.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
    print(f"report: {options.out}")
    return 0 if report["repeats"] and all(check.passed for check in checks) else 1


def choose_gpu(command: str, name: str) -> torch.device:
    """The device of that name, or the CPU where Triton interprets its programs."""
    device = torch.device("cpu" if interprets() else name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{command} needs a GPU, and torch finds none; TRITON_INTERPRET=1 rehearses it")
    return device


def _kernels(device: torch.device, dtype: torch.dtype) -> list[Kernel]:
    if interprets():
        return [kernel for kernel in kernels_for(torch.device("cuda")) if kernel.name == "triton"]
    return [kernel for kernel in kernels_for(device) if kernel.why_not(Request(device, dtype)) is None]


def _checks(device: torch.device, quick: bool) -> Iterator[Check]:
    """Every option in every dtype, kernel and some head sizes, then a block pattern."""
    configurations = [each for each in CONFIGURATIONS if not quick or each[0] in QUICK]
    dtypes, head_dims = (DTYPES[-1:], HEAD_DIMS[1:2]) if quick else (DTYPES, HEAD_DIMS)
    for (title, options), dtype in product(configurations, dtypes):
        given = {name: value for name, value in options.items() if name != "num_kv_heads"}
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}
        define = partial(dilated_attention_reference, **given)
        for kernel, d in product(_kernels(device, getattr(torch, dtype)), head_dims):
            attend = partial(dilated_attention, **moved, execution=Execution(kernel.name))
            sizes = {"kv_heads": options.get("num_kv_heads", HEADS), "d": d}
            name = f"{title}, {kernel.name}, {dtype}, head size {d}"
            yield compare(name, dtype, device, attend, define, **sizes)
    pattern = build_block_pattern(SparsePatternConfig("local_window", 0.4, 32), LENGTH, HEADS, is_causal=True)
    how: dict[str, Any] = {"is_causal": True, "execution": Execution("triton")}
    attend = partial(block_sparse_attention, pattern=pattern, **how)
    define = partial(block_sparse_attention_reference, mask=pattern.to_dense(), is_causal=True)
    yield compare("block pattern, triton, float16", "float16", device, attend, define, d=64)
    for last in (1, 20):
        yield _decode(f"the newest {last} of {LENGTH} tokens, triton, float16", device, last)


def _decode(title: str, device: torch.device, last: int) -> Check:
    """New tokens of a stream against the last rows of the definition; they have no gradient."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, LENGTH, h, 64, generator=rng).half() for h in (HEADS, HEADS // 2, HEADS // 2))
    branches: dict[str, Any] = {"segment_lengths": (16, LENGTH), "dilation_rates": (1, 2)}
    define = partial(dilated_attention_reference, **branches, is_causal=True)
    attend = partial(attend_last, **branches, execution=Execution("triton"))
    with torch.no_grad():
        got = attend(*(x.to(device) for x in (q[:, -last:], k, v))).cpu()
        want = gate.call(define, [x.double() for x in (q, k, v)], None)[0][:, -last:]
    return Check(title, gate.largest_error(got, want), 0.0, gate.TOLERANCES["float16"])


def _repeats(device: torch.device, n: int) -> bool:
    """Whether a call and its gradients have the same bits twice: programs that race would not."""
    rng = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, n, 4, 64, generator=rng).to(device, torch.float16) for _ in range(4)]
    attend = partial(dilated_attention, segment_lengths=(n // 4, n), dilation_rates=(1, 4))
    attend = partial(attend, is_causal=True, execution=Execution("triton"))
    first, second = (gate.call(attend, inputs[:3], inputs[3]) for _ in range(2))
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def _times(device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """Each candidate at each length: seconds forward and with gradients, and memory beside the inputs."""
    print(paint("times", "bold"), f"(median of {ROUNDS}: forward, with backward; memory)")
    for n in (8192,) if quick else (8192, 32768, 131072):
        shape = 1, n, TIMED_HEADS, TIMED_HEAD_DIM
        inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
        for name, attend in _candidates(n).items():
            found = shown = attempt(partial(_time, attend, inputs))
            if not isinstance(found, str):
                seconds = (show_seconds(found[x]) for x in ("forward", "both"))
                shown = ", ".join([*seconds, show_bytes(found["memory"])])
            print(f"  {n:>7} {name:<24} {shown}", flush=True)
            yield {"n": n, "candidate": name, **({"error": found} if isinstance(found, str) else found)}


def attempt(work: Callable[[], _T]) -> _T | str:
    """What it gives, or what went wrong in a compiler, a driver or another package: the next one is tried."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _candidates(n: int) -> dict[str, Callable[..., Any]]:
    lengths, rates = branches_for(n)
    found: dict[str, Callable[..., Any]] = {"dense, SDPA": _sdpa}
    for kernel in ("triton", "stock"):
        given = {"segment_lengths": lengths, "dilation_rates": rates, "execution": Execution(kernel)}
        found[f"dilated, {kernel}"] = partial(dilated_attention, **given)
    pattern = build_block_pattern(SparsePatternConfig("local_window", 0.1, 128), n, TIMED_HEADS)
    found["blocks, triton"] = partial(block_sparse_attention, pattern=pattern, execution=Execution("triton"))
    found["blocks, FlexAttention"] = partial(block_sparse_attention, pattern=pattern)
    if find_spec("flash_attn"):
        found["dense, flash-attn"] = import_module("flash_attn").flash_attn_func
    if find_spec("natten"):
        found["window, NATTEN"] = partial(import_module("natten").na1d, kernel_size=2047)
    return found


def _sdpa(*tensors: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in tensors)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _time(attend: Callable[..., Any], inputs: list[Tensor]) -> dict[str, float]:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = {"forward": _median(lambda: gate.call(attend, inputs[:3], None))}
    found["both"] = _median(lambda: gate.call(attend, inputs[:3], inputs[3]))
    return {**found, "memory": torch.cuda.max_memory_allocated() - before}


def _median(work: Callable[[], Any]) -> float:
    seconds = list[float]()
    for _ in range(ROUNDS + 3):  # the first ones compile
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return sorted(seconds[3:])[ROUNDS // 2]
