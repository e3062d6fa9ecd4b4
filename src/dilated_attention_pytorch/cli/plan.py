"""Proposes settings for sequences of a length: segment lengths and rates by LongNet's geometric rule, kind of
module, pool and cache; with the FLOPs, memory and communication to expect, the reasons, and code to paste.
What is predicted is that of attention alone: projections, feed-forward and weights come on top."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..flags import byte_count, int_list, positive_int
from .text import paint, print_json, show_bytes, show_count

if TYPE_CHECKING:
    from ..plan import Pass
    from .plan_proposal import Proposal

DTYPES = ("float32", "bfloat16", "float16", "float64")
EPILOG = """\
examples:
  dilated-attention plan --length 1M --dtype bfloat16 --causal --memory 8GiB
  dilated-attention plan --length 65536 --heads 16 --head-dim 64 --layers 12 --train
  dilated-attention plan --length 64k --segments 4k,64k --rates 1,8
  dilated-attention plan --length 16M --ranks 64 --dtype bfloat16 --train --memory 16GiB --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "--length", "--lengths", type=positive_int, required=True, metavar="N", help="tokens: 65536, 64k, 1M"
    )
    parser.add_argument("--heads", type=positive_int, default=8, metavar="H", help="(default: 8)")
    parser.add_argument("--kv-heads", type=positive_int, metavar="H", help="key heads (default: as many)")
    parser.add_argument("--head-dim", type=positive_int, default=64, metavar="D", help="(default: 64)")
    parser.add_argument("--batch", type=positive_int, default=1, metavar="B", help="sequences (default: 1)")
    parser.add_argument("--layers", type=positive_int, default=1, metavar="L", help="(default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    parser.add_argument("--train", action="store_true", help="with gradients")
    parser.add_argument("--causal", action="store_true", help="no token sees a later one")
    parser.add_argument("--ranks", type=positive_int, default=1, metavar="R", help="processes (default: 1)")
    parser.add_argument(
        "--memory", type=byte_count, metavar="SIZE", help="of each rank, as 8GiB (default: what is free here)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: cpu)")
    parser.add_argument(
        "--first-segment", type=positive_int, metavar="W", help="shortest segment (default: 2048)"
    )
    parser.add_argument(
        "--ratio",
        type=positive_int,
        metavar="A",
        help="growth of lengths and rates (default: 2 where five branches suffice, else 4)",
    )
    parser.add_argument(
        "--segments", type=int_list, metavar="W,...", help="segment lengths, instead of proposed ones"
    )
    parser.add_argument("--rates", type=int_list, metavar="R,...", help="dilation rates of --segments")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(options: argparse.Namespace) -> int:
    from .plan_proposal import make_proposal

    _check_device(options.device)
    proposal = make_proposal(options)
    advice = _advice(proposal, options)
    if options.json:
        print_json({**as_dict(proposal), **advice, "code": code_of(proposal)})
        return 0
    for line in _lines(proposal, advice):
        print(line)
    return 0


def _check_device(device: str) -> None:
    import torch

    try:
        torch.device(device)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"--device must name a device of torch, got {device!r}: {first}") from None


def _advice(proposal: Proposal, options: argparse.Namespace) -> dict[str, Any]:
    """The longest sequence for the memory and, where this one does not fit, the ranks that it takes."""
    from .plan_proposal import fewest_ranks, longest_length

    if proposal.budget is None:
        return {"longest_length": None, "ranks_that_fit": None}
    ranks = proposal.ranks if proposal.fits else fewest_ranks(options, proposal.budget)
    return {"longest_length": longest_length(options, proposal.budget), "ranks_that_fit": ranks}


def as_dict(proposal: Proposal) -> dict[str, Any]:
    """The plan in numbers."""
    call = proposal.call
    shape, spec = call.shape, call.spec
    directions: tuple[Pass, ...] = ("forward", "backward") if call.train else ("forward",)
    return {
        "length": shape.n,
        "batch": shape.b,
        "heads": shape.h,
        "kv_heads": shape.h_kv,
        "head_dim": shape.d,
        "layers": call.layers,
        "dtype": str(call.dtype).removeprefix("torch."),
        "device": str(call.device),
        "is_causal": spec.is_causal,
        "train": call.train,
        "ranks": proposal.ranks,
        "segment_lengths": list(spec.segment_lengths),
        "dilation_rates": list(spec.dilation_rates),
        "kind": proposal.kind,
        "options": dict(proposal.options),
        "flops": {direction: proposal.flops(direction) for direction in directions},
        "share_of_dense_flops": proposal.pairs / proposal.dense_pairs,
        "time_over_dense": proposal.relative_time,
        "memory": {**proposal.memory._asdict(), "peak": proposal.memory.peak},
        "memory_budget": proposal.budget,
        "fits": proposal.fits,
        "strategy": None if proposal.schedule is None else proposal.schedule.strategy,
        "received_bytes": {direction: proposal.received_bytes(direction) for direction in directions},
        "reasons": list(proposal.reasons),
    }


def _lines(proposal: Proposal, advice: dict[str, Any]) -> Iterator[str]:
    facts = as_dict(proposal)
    causal = ", causal" if facts["is_causal"] else ""
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
    if proposal.relative_time is not None:
        yield f"time              about {proposal.relative_time:.2g} of dense attention's"
    yield from _memory_lines(proposal, advice)
    if proposal.ranks > 1:
        received = "; ".join(f"{name} {show_bytes(x)}" for name, x in facts["received_bytes"].items())
        yield f"communication     {facts['strategy']} of {proposal.ranks}; a rank receives {received}"
    yield paint("\nreasons", "bold")
    yield from (f"- {reason}" for reason in proposal.reasons)
    yield paint("\ncode", "bold")
    yield code_of(proposal)


def _memory_lines(proposal: Proposal, advice: dict[str, Any]) -> Iterator[str]:
    parts = [f"{name} {show_bytes(value)}" for name, value in proposal.memory._asdict().items() if value]
    of_rank = " a rank" if proposal.ranks > 1 else ""
    yield f"peak memory       {show_bytes(proposal.memory.peak)}{of_rank}: {', '.join(parts)}"
    if proposal.budget is None:
        return
    verdict = paint("fits", "green") if proposal.fits else paint("does not fit", "red")
    yield (
        f"                  {verdict} {show_bytes(proposal.budget)}, in which the longest sequence has "
        f"about {advice['longest_length']:,} tokens"
    )
    if not proposal.fits:
        ranks = advice["ranks_that_fit"]
        yield " " * 18 + (f"{ranks} ranks would fit" if ranks else "more ranks would not fit either")


def code_of(proposal: Proposal) -> str:
    """A program that attends once with the proposed settings."""
    return _ring_code(proposal) if proposal.ranks > 1 else _local_code(proposal)


def _local_code(proposal: Proposal) -> str:
    return f"""\
import torch
from dilated_attention_pytorch import create_dilated_attention

{_module_code(proposal)}
{_input_code(proposal, proposal.call.shape.n)}
{_call_code(proposal)}
"""


def _ring_code(proposal: Proposal) -> str:
    call, ranks = proposal.call, proposal.ranks
    backend = "nccl" if call.device.type == "cuda" else "gloo"
    return f"""\
# torchrun --nproc-per-node {ranks} this_file.py
import torch
import torch.distributed as dist
from dilated_attention_pytorch import create_dilated_attention, even_shards

dist.init_process_group("{backend}")
n_local = even_shards({call.shape.n}, dist.get_world_size())[dist.get_rank()]  # tokens of this process
{_module_code(proposal)}
{_input_code(proposal, "n_local")}
{_call_code(proposal)}
dist.destroy_process_group()
"""


def _module_code(proposal: Proposal) -> str:
    spec = proposal.call.spec
    options = {"segment_lengths": tuple(spec.segment_lengths), "dilation_rates": tuple(spec.dilation_rates)}
    lines = [f"    {name}={_literal(value)},\n" for name, value in (options | {**proposal.options}).items()]
    return f"""\
attention = create_dilated_attention(
    "{proposal.kind}",
{"".join(lines)})"""


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _call_code(proposal: Proposal) -> str:
    line = f"out = attention(q, k, v, is_causal={proposal.call.spec.is_causal})"
    return line + "\nout.sum().backward()" if proposal.call.train else line


def _input_code(proposal: Proposal, n: int | str) -> str:
    call = proposal.call
    b, _, h, h_kv, d = call.shape
    settings = f"dtype={call.dtype}"
    settings += "" if call.device.type == "cpu" else f', device="{call.device}"'
    settings += ", requires_grad=True" if call.train else ""
    lines = [f"q = torch.randn({b}, {n}, {h}, {d}, {settings})"]
    lines += [f"{name} = torch.randn({b}, {n}, {h_kv}, {d}, {settings})" for name in ("k", "v")]
    return "\n".join(lines)
