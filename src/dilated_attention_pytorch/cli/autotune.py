"""`autotune`: times blocks of the Triton kernel on this GPU, and stores the best for the calls to come."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..functional import dilated_attention
from ..kernels import Request, triton
from ..kernels.triton import interprets, tuned, tuning
from ..kernels.triton.tuned import Result
from ..kernels.triton.tuning import Blocks, Pass
from ..spec import Execution, branches_for
from .bench import gate
from .bench.measure import interleave
from .bench.record import check_places, write_text
from .gpu_check import attempt, choose_gpu
from .text import paint

HEAD_DIMS = (32, 64, 80, 96, 128)
LENGTH, HEADS, ROUNDS = 16384, 16, 20
QUICK_CANDIDATES = 6
MARGIN = 0.98  # of the shipped blocks' time: what is less than that faster is not worth being stored
Call = Callable[[], list[Tensor]]


def run(options: Namespace) -> int:
    """Tunes what can run, each setting stored when it is known; 1 where nothing could be timed."""
    device = choose_gpu("autotune", options.device)
    settings = _settings(device, options)
    name = tuned.device_name(device)
    file = tuned.tuning_file(name)
    if file is not None:  # it is found out to be writable before anything is timed
        file.parent.mkdir(parents=True, exist_ok=True)
        check_places(file)
    print(paint(f"{name}: {len(settings)} settings", "bold"), "(queries x keys, warps, stages)")
    done = 0
    try:
        for number, (dtype, d, which) in enumerate(settings, 1):
            print(f"[{number}/{len(settings)}] {which}, {dtype}, head size {d}", flush=True)
            result = _tune(device, which, dtype, d, options.quick)
            if result is not None and file is not None:
                store(file, name, result)
            done += result is not None
    finally:  # also where it is interrupted
        where = f"stored in {file}" if file else f"stored nowhere, as {tuned.VARIABLE} names no file"
        print(f"{done} of {len(settings)} settings tuned, {where}", flush=True)
    return 0 if done else 1


def _settings(device: torch.device, options: Namespace) -> list[tuple[str, int, Pass]]:
    """dtype, head size and pass of what is asked for and can run."""
    dtypes = options.dtypes or (("float32",) if interprets() else tuple(tuned.DTYPES))
    head_dims = options.head_dims or (HEAD_DIMS[:1] if interprets() else HEAD_DIMS)
    found = list[tuple[str, int, Pass]]()
    for dtype, d in product(dtypes, head_dims):
        reason = triton.why_not(Request(device, getattr(torch, dtype), head_dim=d))
        found += [] if reason else [(dtype, d, which) for which in tuned.PASSES]
        if reason:
            print(f"{dtype}, head size {d}: {reason}")
    if not found:
        raise ValueError(f"the triton kernel can run none of what is asked for: {reason}")
    return found


def store(file: Path, name: str, result: Result) -> None:
    """Adds a result to those of its device, or replaces it; what is out of date or damaged goes."""
    devices: dict[str, Any] = {}
    kept: list[Result] = []
    with suppress(OSError, ValueError):
        devices = tuned.read_document(file)
        kept = tuned.read_results(devices, name)
    results = [*(x for x in kept if x[:3] != result[:3]), result]
    devices[name] = {"made_with": tuned.made_with(), "results": [x._asdict() for x in results]}
    write_text(file, json.dumps({"format": tuned.FORMAT, "devices": devices}, indent=1) + "\n")


def _tune(device: torch.device, which: Pass, dtype: str, d: int, quick: bool) -> Result | None:
    """The fastest of the candidates whose answers are right; None if the shipped blocks cannot run."""
    itemsize = tuned.DTYPES[dtype]
    shipped = tuning.blocks_for(triton._target(device), which, itemsize, d)
    tried = tuning.candidates(shipped, which, itemsize, d, tuned.shared_memory(device))
    tried = tried[: 2 if interprets() else QUICK_CANDIDATES if quick else None]
    runs = _right_ones(device, which, dtype, d, tried)
    if str(shipped) not in runs:
        return None
    timings = interleave(runs, 1 if interprets() else ROUNDS)
    seconds = {blocks: timings[str(blocks)].median for blocks in tried if str(blocks) in runs}
    ranked = sorted(seconds, key=lambda blocks: seconds[blocks])
    for blocks in ranked:
        note = ", shipped" if blocks == shipped else ""
        print(f"  {blocks!s:<20} {1e3 * seconds[blocks]:.3f} ms{note}")
    best = ranked[0] if seconds[ranked[0]] < MARGIN * seconds[shipped] else shipped
    print(f"  {paint(str(best), 'green')}", flush=True)
    return Result(which, dtype, d, best, seconds[best], seconds[shipped])


def _right_ones(
    device: torch.device, which: Pass, dtype: str, d: int, tried: Sequence[Blocks]
) -> dict[str, Call]:
    """The candidates that run and whose answers equal those of the first, which are the shipped blocks."""
    call = attempt(partial(_make_call, device, which, dtype, d))
    if isinstance(call, str):
        print(f"  {call}", flush=True)
        return {}
    expected: list[Tensor] | None = None
    right: dict[str, Call] = {}
    for blocks in tried:
        found = attempt(partial(_run, device, which, blocks, call))
        if isinstance(found, str):
            print(f"  {blocks!s:<20} {found}", flush=True)
            if expected is None:  # there is nothing to compare the others with
                break
            continue
        expected = expected or found
        off = max(gate.largest_error(*pair) for pair in zip(found, expected, strict=True))
        if off <= gate.TOLERANCES[dtype]:
            right[str(blocks)] = partial(_run, device, which, blocks, call)
        else:
            most = f"more than {gate.TOLERANCES[dtype]:.0e}"
            print(f"  {blocks!s:<20} off by {off:.1e}, {most}: not timed", flush=True)
    return right


def _run(device: torch.device, which: Pass, blocks: Blocks, call: Call) -> list[Tensor]:
    with tuned.trying(which, blocks):
        found = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # so that what fails on the GPU fails here
    return found


def _make_call(device: torch.device, which: Pass, dtype: str, d: int) -> Call:
    """A causal call of usual branches, or its backward pass: out, or the gradients."""
    n, heads = (64, 2) if interprets() else (LENGTH, HEADS)
    lengths, rates = ((32, 64), (1, 2)) if interprets() else branches_for(n)
    rng = torch.Generator().manual_seed(0)
    *inputs, grad_out = (
        torch.randn(1, n, heads, d, generator=rng).to(device, getattr(torch, dtype)) for _ in range(4)
    )
    given: dict[str, Any] = {"is_causal": True, "execution": Execution("triton")}
    attend = partial(dilated_attention, segment_lengths=lengths, dilation_rates=rates, **given)
    if which == "attend":
        return partial(gate.call, attend, inputs, None)
    leaves = [x.requires_grad_() for x in inputs]
    out = attend(*leaves)
    return lambda: list(torch.autograd.grad(out, leaves, grad_out, retain_graph=True))
