"""What `plan` proposes: branches, kind and settings for a length, with what they cost and why. Plain data."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.host_memory import device_memory
from ..factory import LITTLE_MEMORY, choose_dilated_attention
from ..forecast import Call, Memory, predict_memory, relative_time
from ..plan import DEFAULT_WORKSPACE_BYTES, Pass, Shape
from ..ring import RingSchedule, plan_ring
from ..spec import DilatedSpec, branches_for
from .text import show_bytes

MAX_RANKS = 1024
FIRST_SEGMENT = 2048
MACHINE_DEPENDENT = ("workspace_bytes", "lightweight_pool")  # what the factory takes from free memory


@dataclass(frozen=True)
class Proposal:
    """A kind of module, its options, what a call of it costs, and the reasons."""

    call: Call
    kind: str
    options: Mapping[str, Any]
    memory: Memory
    budget: int | None
    schedule: RingSchedule | None
    pairs: int
    reasons: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return 1 if self.schedule is None else self.schedule.num_ranks

    @property
    def fits(self) -> bool | None:
        return None if self.budget is None else self.memory.peak <= self.budget

    def as_dict(self) -> dict[str, Any]:
        """The plan in numbers."""
        call, (b, n, h, h_kv, d), spec = self.call, self.call.shape, self.call.spec
        dense_pairs = b * h * (n * (n + 1) // 2 if spec.is_causal else n * n)
        products = {"forward": 2, "backward": 5}  # of matrices, of all layers and ranks
        return {
            "length": n,
            "batch": b,
            "heads": h,
            "kv_heads": h_kv,
            "head_dim": d,
            "layers": call.layers,
            "dtype": str(call.dtype).removeprefix("torch."),
            "device": str(call.device),
            "is_causal": spec.is_causal,
            "train": call.train,
            "ranks": self.ranks,
            "segment_lengths": list(spec.segment_lengths),
            "dilation_rates": list(spec.dilation_rates),
            "kind": self.kind,
            "options": dict(self.options),
            "flops": {x: 2 * products[x] * d * self.pairs * call.layers for x in call.passes},
            "share_of_dense_flops": self.pairs / dense_pairs,
            # It can be told on one CPU; that of ranks depends on their network.
            "time_over_dense": None if self.ranks > 1 else relative_time(call),
            "memory": {**self.memory._asdict(), "peak": self.memory.peak},
            "memory_budget": self.budget,
            "fits": self.fits,
            "strategy": None if self.schedule is None else self.schedule.strategy,
            "received_bytes": {direction: self._received_bytes(direction) for direction in call.passes},
            "reasons": list(self.reasons),
        }

    def _received_bytes(self, direction: Pass) -> int:
        """Of all layers, by the rank that receives most."""
        if self.schedule is None:
            return 0
        # The middle and both ends: bytes sent back are counted peer by peer, which takes long for many.
        ends = {*range(min(8, self.ranks)), self.ranks // 2, *range(max(0, self.ranks - 8), self.ranks)}
        return max(self.schedule.received_bytes(rank, direction) for rank in ends) * self.call.layers


def make_proposal(options: Namespace) -> Proposal:
    """From the options of the command; a ValueError states what does not fit."""
    if options.heads % (options.kv_heads or options.heads):
        raise ValueError(f"--kv-heads must divide --heads, got {options.kv_heads} and {options.heads}")
    if options.ratio is not None and options.ratio < 2:
        rule = "--ratio must be at least 2, or the segments never span the sequence"
        raise ValueError(f"{rule}, got {options.ratio}")
    spec, reasons = _choose_branches(options)
    device, heads = _device(options.device), (options.heads, options.kv_heads or options.heads)
    shape = Shape(options.batch, options.length, *heads, options.head_dim)
    call = Call(shape, getattr(torch, options.dtype), spec, options.train, options.layers, device)
    free = device_memory(device)
    budget = options.memory or (None if free is None else free.available)
    return _settle(call, options.ranks, budget, options.memory is not None, reasons)


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"--device must name a device of torch, got {name!r}: {first}") from None


def _choose_branches(options: Namespace) -> tuple[DilatedSpec, list[str]]:
    """What --segments and --rates say, or else the library's branches for the length; and why these."""
    n: int = options.length
    if (options.segments is None) != (options.rates is None):
        raise ValueError("--segments and --rates are given together, got one of them")
    if options.segments is not None:
        if options.first_segment or options.ratio:
            raise ValueError("--first-segment and --ratio propose segments, got them with --segments")
        spec = DilatedSpec(options.segments, options.rates, options.causal)
        longest = max(options.segments)
        apart = f"; positions in different segments of {longest} never meet" if longest < n else ""
        return spec, [f"segments: as --segments and --rates say{apart}"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = options.first_segment or FIRST_SEGMENT
        branches = branches_for(n, options.heads, first=first, ratio=options.ratio)
    spec = DilatedSpec(*branches, options.causal)
    return spec, [*_branch_reasons(spec, n), *(f"rates: {warning.message}" for warning in caught)]


def _settle(
    call: Call, ranks: int, budget: int | None, is_given: bool, branch_reasons: list[str]
) -> Proposal:
    """Kind and settings for a call, whose costs then follow from the call's own plan or schedule."""
    spec, shape = call.spec, call.shape
    kind = "ring" if ranks > 1 else "auto"
    extra: dict[str, Any] = {} if call.device.type == "cpu" else {"device": str(call.device)}
    branches = (spec.segment_lengths, spec.dilation_rates)
    choice = choose_dilated_attention(kind, *branches, seq_len=shape.n, **extra)
    left_out = {"segment_lengths", "dilation_rates", *(MACHINE_DEPENDENT if is_given else ())}
    chosen = {name: value for name, value in choice.options.items() if name not in left_out}
    reasons = [*branch_reasons, *choice.reasons]
    if is_given:  # the budget decides, not the memory that happens to be free here
        reasons = [reason for reason in reasons if not reason.startswith(MACHINE_DEPENDENT)]
        if budget is not None and budget < LITTLE_MEMORY:
            chosen["workspace_bytes"] = max(2**20, budget // 256)
            reasons.append(f"workspace_bytes: {show_bytes(budget)} are less than {show_bytes(LITTLE_MEMORY)}")
    reasons.append("use_pattern_cache: on by default; calls of the same shape share one plan")
    call = replace(call, workspace_bytes=chosen.get("workspace_bytes", DEFAULT_WORKSPACE_BYTES))
    schedule = _schedule(call, ranks)
    pairs = sum(schedule.num_pairs(rank) for rank in range(ranks))
    if ranks > 1:
        reasons.append(
            f"kind: {ranks} ranks share the sequence; strategy {schedule.strategy} is the cheaper one"
        )
    memory = _rank_memory(call, schedule) if ranks > 1 else predict_memory(call)
    used = schedule if ranks > 1 else None
    return Proposal(call, choice.kind, chosen, memory, budget, used, pairs, tuple(reasons))


def _branch_reasons(spec: DilatedSpec, n: int) -> list[str]:
    lengths = spec.segment_lengths
    if len(lengths) == 1:
        return [f"segments: {n} positions fit one segment of {lengths[0]}, so this is dense attention"]
    ratio = lengths[1] // lengths[0]
    found = [
        f"segments: LongNet's rule, lengths and rates times {ratio} from {lengths[0]} until {lengths[-1]} "
        f"spans {n} positions; so the cost grows with the length, not with its square"
    ]
    if any(w // lengths[0] != r for w, r in spec.branches):
        found.append(
            "rates: each head serves one position in every r, so a rate above the number of heads stays "
            "lower as long as its branch costs no more than the first"
        )
    return found


def _schedule(call: Call, ranks: int) -> RingSchedule:
    """What the ring would do, by the strategy that it would choose; also counts the pairs of one rank."""
    spec, shape = call.spec, call.shape
    schedule = plan_ring(
        spec.segment_lengths,
        spec.dilation_rates,
        shape.n,
        num_heads=shape.h,
        num_kv_heads=shape.h_kv,
        head_dim=shape.d,
        num_ranks=ranks,
        batch_size=shape.b,
        dtype=call.dtype,
        is_causal=spec.is_causal,
        workspace_bytes=call.workspace_bytes,
    )
    return schedule.cheaper() if ranks > 1 else schedule


def _rank_memory(call: Call, schedule: RingSchedule) -> Memory:
    """Of the rank that holds most: the first has the longest shard."""
    held = schedule.memory(0, "backward" if call.train else "forward")
    saved = (call.layers - 1) * -(-call.layer_bytes // schedule.num_ranks) if call.train else 0
    return Memory(held.inputs, held.outputs, held.workspace, held.communication, saved)


def longest_length(options: Namespace, budget: int) -> int:
    """The longest sequence whose peak stays within a budget, by the same rule, to about half a percent."""

    def peak(n: int) -> int:
        return make_proposal(Namespace(**{**vars(options), "length": n, "memory": budget})).memory.peak

    low, high = 0, FIRST_SEGMENT
    while peak(high) <= budget:
        low, high = high, 2 * high
    while high - low > max(1, high // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= budget else (low, middle)
    return low


def fewest_ranks(options: Namespace, budget: int) -> int | None:
    """The smallest power of two of ranks that fit a budget each."""
    ranks: int = 2 * options.ranks
    while ranks <= min(MAX_RANKS, options.length):
        tried = make_proposal(Namespace(**{**vars(options), "ranks": ranks, "memory": budget}))
        if tried.fits:
            return ranks
        ranks *= 2
    return None
