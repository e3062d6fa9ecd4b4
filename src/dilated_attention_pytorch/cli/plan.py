"""Proposes settings for sequences of a length: segment lengths and rates by LongNet's geometric rule, kind of
module, pool and cache; with the FLOPs, memory and communication to expect, the reasons, and code to paste.
What is predicted is that of attention alone: projections, feed-forward and weights come on top."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .text import byte_count, int_list, paint, positive_int, print_json, show_bytes, show_count

if TYPE_CHECKING:
    from .plan_proposal import Proposal

DTYPES = ("float32", "bfloat16", "float16", "float64")
EPILOG = """\
examples:
  dilated-attention plan --length 1M --dtype bfloat16 --causal --memory 8GiB
  dilated-attention plan --length 65536 --heads 16 --head-dim 64 --layers 12 --train
  dilated-attention plan --length 64k --segments 4k,64k --rates 1,8
  dilated-attention plan --length 16M --ranks 64 --dtype bfloat16 --train --memory 16GiB --json
"""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = parser.add_argument
    number: dict[str, Any] = {"type": positive_int, "metavar": "N"}
    add("--length", "--lengths", required=True, help="tokens: 65536, 64k, 1M", **number)
    add("--heads", default=8, help="(default: 8)", **number)
    add("--kv-heads", help="key heads (default: as many)", **number)
    add("--head-dim", default=64, help="(default: 64)", **number)
    add("--batch", default=1, help="sequences (default: 1)", **number)
    add("--layers", default=1, help="(default: 1)", **number)
    add("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    add("--train", action="store_true", help="with gradients")
    add("--causal", action="store_true", help="no token sees a later one")
    add("--ranks", default=1, help="processes (default: 1)", **number)
    memory = "of each rank, as 8GiB (default: what is free here)"
    add("--memory", type=byte_count, metavar="SIZE", help=memory)
    add("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: cpu)")
    add("--first-segment", help="shortest segment (default: 2048)", **number)
    growth = "growth of lengths and rates (default: 2 where five branches suffice, else 4)"
    add("--ratio", help=growth, **number)
    segments = "segment lengths, instead of proposed ones"
    add("--segments", type=int_list, metavar="W,...", help=segments)
    add("--rates", type=int_list, metavar="R,...", help="dilation rates of --segments")
    add("--json", action="store_true", help="print the plan as JSON")


def run(options: argparse.Namespace) -> int:
    from .plan_proposal import fewest_ranks, longest_length, make_proposal

    proposal = make_proposal(options)
    longest = ranks = None  # what the memory is enough for and, where this is not, the ranks that it takes
    if proposal.budget is not None:
        longest = longest_length(options, proposal.budget)
        ranks = proposal.ranks if proposal.fits else fewest_ranks(options, proposal.budget)
    facts = {**proposal.as_dict(), "longest_length": longest, "ranks_that_fit": ranks}
    if options.json:
        print_json({**facts, "code": code_of(proposal)})
        return 0
    for line in _lines(facts):
        print(line)
    print(paint("\ncode", "bold"), code_of(proposal), sep="\n")
    return 0


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    causal, ranks = ", causal" if facts["is_causal"] else "", facts["ranks"]
    yield paint(
        f"{facts['length']:,} tokens, {facts['layers']} layer(s) of {facts['heads']} heads of "
        f"{facts['head_dim']}, {facts['dtype']}{causal}, {'training' if facts['train'] else 'forward'}",
        "bold",
    )
    yield f"segment lengths   {', '.join(map(str, facts['segment_lengths']))}"
    yield f"dilation rates    {', '.join(map(str, facts['dilation_rates']))}"
    options = ", ".join(f"{name}={value!r}" for name, value in facts["options"].items())
    yield f"kind              {facts['kind']}{f' ({options})' if options else ''}"
    flops = "; ".join(f"{name} {show_count(value)}FLOP" for name, value in facts["flops"].items())
    yield f"work              {flops}; {facts['share_of_dense_flops']:.2%} of dense attention"
    if facts["time_over_dense"] is not None:
        yield f"time              about {facts['time_over_dense']:.2g} of dense attention's"
    memory = {name: show_bytes(value) for name, value in facts["memory"].items() if value}
    peak = memory.pop("peak") + (" a rank" if ranks > 1 else "")
    yield f"peak memory       {peak}: {', '.join(f'{name} {size}' for name, size in memory.items())}"
    if facts["memory_budget"] is not None:
        verdict = paint("fits", "green") if facts["fits"] else paint("does not fit", "red")
        longest = f"in which the longest sequence has about {facts['longest_length']:,} tokens"
        yield f"                  {verdict} {show_bytes(facts['memory_budget'])}, {longest}"
        if not facts["fits"]:
            more = facts["ranks_that_fit"]
            yield " " * 18 + (f"{more} ranks would fit" if more else "more ranks would not fit either")
    if ranks > 1:
        received = "; ".join(f"{name} {show_bytes(x)}" for name, x in facts["received_bytes"].items())
        yield f"communication     {facts['strategy']} of {ranks}; a rank receives {received}"
    yield paint("\nreasons", "bold")
    yield from (f"- {reason}" for reason in facts["reasons"])


def code_of(proposal: Proposal) -> str:
    """A program that attends once with the proposed settings."""
    call, is_ring = proposal.call, proposal.ranks > 1
    b, n, h, h_kv, d = call.shape
    branches = {"segment_lengths": call.spec.segment_lengths, "dilation_rates": call.spec.dilation_rates}
    options = {**branches, **proposal.options}
    settings = f"dtype={call.dtype}"
    settings += "" if call.device.type == "cpu" else f', device="{call.device}"'
    settings += ", requires_grad=True" if call.train else ""
    length = "n_local" if is_ring else n
    heads = {"q": h, "k": h_kv, "v": h_kv}
    lines = [
        "attention = create_dilated_attention(",
        f'    "{proposal.kind}",',
        *(f"    {name}={_literal(value)}," for name, value in options.items()),
        ")",
        *(f"{x} = torch.randn({b}, {length}, {heads[x]}, {d}, {settings})" for x in heads),
        f"out = attention(q, k, v, is_causal={call.spec.is_causal})",
        *(["out.sum().backward()"] if call.train else []),
        *(["dist.destroy_process_group()"] if is_ring else []),
    ]
    backend = "nccl" if call.device.type == "cuda" else "gloo"
    head = RING_CODE.format(ranks=proposal.ranks, backend=backend, n=n) if is_ring else LOCAL_CODE
    return head + "\n".join(lines) + "\n"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
