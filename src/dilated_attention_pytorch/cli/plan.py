"""`plan`: proposes branches, kind and settings for a length, with what they cost, the reasons, and code."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..core.host_memory import device_memory
from ..factory import LITTLE_MEMORY, choose_dilated_attention
from ..plan import DEFAULT_WORKSPACE_BYTES, Pass, Shape
from ..ring import RingSchedule, plan_ring
from ..spec import DilatedSpec, branches_for
from .forecast import Call, Memory, predict_memory, relative_time
from .text import labelled, paint, print_json, show_bytes, show_count

MAX_RANKS = 1024
FIRST_SEGMENT = 2048
MACHINE_DEPENDENT = ("workspace_bytes", "lightweight_pool")  # what the factory takes from free memory
PRODUCTS = {"forward": 2, "backward": 5}  # of matrices, for every pair
LOCAL_CODE = """\
import torch
from dilated_attention_pytorch import create_dilated_attention

"""
RING_CODE = """\
# torchrun --nproc-per-node {ranks} this_file.py
import torch
import torch.distributed as dist
from dilated_attention_pytorch import create_dilated_attention, even_shards

dist.init_process_group("{backend}")
n_local = even_shards({n}, dist.get_world_size())[dist.get_rank()]  # tokens of this process
"""


@dataclass(frozen=True)
class Proposal:
    """A kind of module, its options and the reasons; its costs follow from the plan of the call itself."""

    call: Call
    ranks: int
    kind: str
    options: Mapping[str, Any]
    reasons: tuple[str, ...]
    budget: int | None

    @cached_property
    def schedule(self) -> RingSchedule:
        """What the ring would do, by the strategy that it would choose."""
        spec, (b, n, h, h_kv, d) = self.call.spec, self.call.shape
        sizes: dict[str, Any] = {"num_heads": h, "num_kv_heads": h_kv, "head_dim": d, "batch_size": b}
        how: dict[str, Any] = {"dtype": self.call.dtype, "is_causal": spec.is_causal}
        how |= {"num_ranks": self.ranks, "workspace_bytes": self.call.workspace_bytes}
        schedule = plan_ring(spec.segment_lengths, spec.dilation_rates, n, **sizes, **how)
        return schedule.cheaper() if self.ranks > 1 else schedule

    @cached_property
    def memory(self) -> Memory:
        """Of the rank that holds most: the first has the longest shard."""
        if self.ranks == 1:
            return predict_memory(self.call)
        held = self.schedule.memory(0, self.call.passes[-1])
        saved = (self.call.layers - 1) * -(-self.call.layer_bytes // self.ranks) if self.call.train else 0
        return Memory(held.inputs, held.outputs, held.workspace, held.communication, saved)

    @cached_property
    def pairs(self) -> dict[str, int]:
        """Query-key pairs of a layer: those that are scored, and those of the definition."""
        if self.ranks == 1:
            plan = self.call.plan("forward")
            return {"scored": plan.num_pairs, "defined": plan.num_defined_pairs}
        return dict.fromkeys(("scored", "defined"), sum(map(self.schedule.num_pairs, range(self.ranks))))

    @property
    def fits(self) -> bool | None:
        return None if self.budget is None else self.memory.peak <= self.budget

    def as_dict(self) -> dict[str, Any]:
        """The plan in numbers; pairs, FLOPs and received bytes are those of all layers."""
        call, (b, n, h, h_kv, d), spec = self.call, self.call.shape, self.call.spec
        pairs = self.pairs["scored"]
        dense_pairs = b * h * (n * (n + 1) // 2 if spec.is_causal else n * n)
        cheaper = f"strategy {self.schedule.strategy} is the cheaper one"
        shared = [f"kind: {self.ranks} ranks share the sequence; {cheaper}"] if self.ranks > 1 else []
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
            "pairs": {x: call.layers * count for x, count in self.pairs.items()},
            "flops": {x: 2 * PRODUCTS[x] * d * pairs * call.layers for x in call.passes},
            "share_of_dense_flops": pairs / dense_pairs,
            # It can be told on one CPU; that of ranks depends on their network.
            "time_over_dense": None if self.ranks > 1 else relative_time(call),
            "memory": {**self.memory._asdict(), "peak": self.memory.peak},
            "memory_budget": self.budget,
            "fits": self.fits,
            "strategy": None if self.ranks == 1 else self.schedule.strategy,
            "received_bytes": {x: call.layers * self._received_bytes(x) for x in call.passes},
            "reasons": [*self.reasons, *shared],
        }

    def _received_bytes(self, direction: Pass) -> int:
        """By the rank that receives most."""
        # The middle and both ends: bytes sent back are counted peer by peer, which takes long for many.
        ends = {*range(min(8, self.ranks)), self.ranks // 2, *range(max(0, self.ranks - 8), self.ranks)}
        return max(self.schedule.received_bytes(rank, direction) for rank in ends) if self.ranks > 1 else 0


def run(options: Namespace) -> int:
    """Prints the proposal, what the memory is enough for and, where it is not, the ranks that it takes."""
    proposal = make_proposal(options)
    longest = ranks = None
    if proposal.budget is not None:
        longest = longest_length(options, proposal.budget)
        ranks = proposal.ranks if proposal.fits else fewest_ranks(options, proposal.budget)
    facts = {**proposal.as_dict(), "longest_length": longest, "ranks_that_fit": ranks}
    if options.json:
        print_json({**facts, "code": code_of(proposal)})
    else:
        print(*_lines(facts), paint("\ncode", "bold"), code_of(proposal), sep="\n")
    return 0


def make_proposal(options: Namespace) -> Proposal:
    """From the options of the command; a ValueError states what does not fit."""
    if options.heads % (options.kv_heads or options.heads):
        raise ValueError(f"--kv-heads must divide --heads, got {options.kv_heads} and {options.heads}")
    if options.ratio is not None and options.ratio < 2:
        rule = "--ratio must be at least 2, or the segments never span the sequence"
        raise ValueError(f"{rule}, got {options.ratio}")
    spec, reasons = _choose_branches(options)
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        rule = f"--device must name a device of torch, got {options.device!r}"
        raise ValueError(f"{rule}: {first}") from None
    free = device_memory(device)
    budget: int | None = options.memory or (None if free is None else free.available)
    extra: dict[str, Any] = {} if device.type == "cpu" else {"device": str(device)}
    branches = (spec.segment_lengths, spec.dilation_rates)
    kind = "ring" if options.ranks > 1 else "auto"
    choice = choose_dilated_attention(kind, *branches, seq_len=options.length, **extra)
    chosen = {x: value for x, value in choice.options.items() if not x.endswith(("_lengths", "_rates"))}
    reasons += choice.reasons
    if options.memory is not None:  # it decides, not the memory that happens to be free here
        chosen = {name: value for name, value in chosen.items() if name not in MACHINE_DEPENDENT}
        reasons = [reason for reason in reasons if not reason.startswith(MACHINE_DEPENDENT)]
        if options.memory < LITTLE_MEMORY:
            chosen["workspace_bytes"] = max(2**20, options.memory // 256)
            less = f"{show_bytes(options.memory)} are less than {show_bytes(LITTLE_MEMORY)}"
            reasons.append(f"workspace_bytes: {less}")
    reasons.append("use_pattern_cache: on by default; calls of the same shape share one plan")
    heads = (options.heads, options.kv_heads or options.heads)
    shape = Shape(options.batch, options.length, *heads, options.head_dim)
    workspace = chosen.get("workspace_bytes", DEFAULT_WORKSPACE_BYTES)
    sizes = (shape, getattr(torch, options.dtype), spec, options.train, options.layers)
    call = Call(*sizes, device, workspace)
    return Proposal(call, options.ranks, choice.kind, chosen, tuple(reasons), budget)


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
    spec, lengths = DilatedSpec(*branches, options.causal), branches[0]
    reasons = [f"segments: {n} positions fit one segment of {lengths[0]}, so this is dense attention"]
    if len(lengths) > 1:
        growth = f"lengths and rates times {lengths[1] // lengths[0]} from {lengths[0]} until {lengths[-1]}"
        linear = "so the cost grows with the length, not with its square"
        reasons = [f"segments: LongNet's rule, {growth} spans {n} positions; {linear}"]
    if any(w // lengths[0] != r for w, r in spec.branches):
        reasons.append(
            "rates: each head serves one position in every r, so a rate above the number of heads stays "
            "lower as long as its branch costs no more than the first"
        )
    return spec, [*reasons, *(f"rates: {warning.message}" for warning in caught)]


def longest_length(options: Namespace, budget: int) -> int:
    """The longest sequence whose peak stays within a budget, by the same rule, to about half a percent."""

    def memory(n: int) -> Memory:
        return make_proposal(Namespace(**{**vars(options), "length": n, "memory": budget})).memory

    short: int = FIRST_SEGMENT * options.ranks
    tokens = memory(short)
    # All but the workspace grows with the length: so many tokens fit at most, and then a little fewer.
    n = budget * short // (tokens.inputs + tokens.results + tokens.saved)
    while n > 0 and (peak := memory(n).peak) > budget:
        n = min(n - 1, int(n * budget / peak * (1 - 1 / 512)))
    return n


def fewest_ranks(options: Namespace, budget: int) -> int | None:
    """The smallest power of two of ranks that fit a budget each."""
    ranks: int = 2 * options.ranks
    while ranks <= min(MAX_RANKS, options.length):
        if make_proposal(Namespace(**{**vars(options), "ranks": ranks, "memory": budget})).fits:
            return ranks
        ranks *= 2
    return None


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    causal, ranks = ", causal" if facts["is_causal"] else "", facts["ranks"]
    heads = f"{facts['layers']} layer(s) of {facts['heads']} heads of {facts['head_dim']}"
    passes = "training" if facts["train"] else "forward"
    yield paint(f"{facts['length']:,} tokens, {heads}, {facts['dtype']}{causal}, {passes}", "bold")
    yield from labelled("segment lengths", ", ".join(map(str, facts["segment_lengths"])))
    yield from labelled("dilation rates", ", ".join(map(str, facts["dilation_rates"])))
    options = ", ".join(f"{name}={value!r}" for name, value in facts["options"].items())
    yield from labelled("kind", f"{facts['kind']}{f' ({options})' if options else ''}")
    flops = "; ".join(f"{name} {show_count(value)}FLOP" for name, value in facts["flops"].items())
    pairs = {name: show_count(count).strip() for name, count in facts["pairs"].items()}
    yield from labelled(
        "work",
        f"{flops}; {facts['share_of_dense_flops']:.2%} of dense attention",
        f"pairs scored {pairs['scored']}, of the definition {pairs['defined']}",
    )
    if facts["time_over_dense"] is not None:
        yield from labelled("time", f"about {facts['time_over_dense']:.2g} of dense attention's")
    yield from labelled("peak memory", *_memory_lines(facts))
    if ranks > 1:
        received = "; ".join(f"{name} {show_bytes(x)}" for name, x in facts["received_bytes"].items())
        yield from labelled("communication", f"{facts['strategy']} of {ranks}; a rank receives {received}")
    yield paint("\nreasons", "bold")
    yield from (f"- {reason}" for reason in facts["reasons"])


def _memory_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    memory = {name: show_bytes(value) for name, value in facts["memory"].items() if value}
    peak = memory.pop("peak") + (" a rank" if facts["ranks"] > 1 else "")
    yield f"{peak}: {', '.join(f'{name} {size}' for name, size in memory.items())}"
    if facts["memory_budget"] is not None:
        verdict = paint("fits", "green") if facts["fits"] else paint("does not fit", "red")
        longest = f"in which the longest sequence has about {facts['longest_length']:,} tokens"
        yield f"{verdict} {show_bytes(facts['memory_budget'])}, {longest}"
        if not facts["fits"]:
            more = facts["ranks_that_fit"]
            yield f"{more} ranks would fit" if more else "more ranks would not fit either"


def code_of(proposal: Proposal) -> str:
    """A program that attends once with the proposed settings."""
    call, is_ring = proposal.call, proposal.ranks > 1
    b, n, h, h_kv, d = call.shape
    branches = {"segment_lengths": call.spec.segment_lengths, "dilation_rates": call.spec.dilation_rates}
    settings = f"dtype={call.dtype}"
    settings += "" if call.device.type == "cpu" else f', device="{call.device}"'
    settings += ", requires_grad=True" if call.train else ""
    length = "n_local" if is_ring else n
    lines = ["attention = create_dilated_attention(", f'    "{proposal.kind}",']
    for name, value in {**branches, **proposal.options}.items():
        shown = f'"{value}"' if isinstance(value, str) else repr(value)
        lines.append(f"    {name}={shown},")
    lines += [")"]
    for name, heads in {"q": h, "k": h_kv, "v": h_kv}.items():
        lines.append(f"{name} = torch.randn({b}, {length}, {heads}, {d}, {settings})")
    lines += [f"out = attention(q, k, v, is_causal={call.spec.is_causal})"]
    lines += ["out.sum().backward()"] if call.train else []
    lines += ["dist.destroy_process_group()"] if is_ring else []
    backend = "nccl" if call.device.type == "cuda" else "gloo"
    head = RING_CODE.format(ranks=proposal.ranks, backend=backend, n=n) if is_ring else LOCAL_CODE
    return head + "\n".join(lines) + "\n"
