"""Says what is installed, what this machine offers, which kernels can run here and why others cannot; then
checks the library against its definition, forward and gradients. Exit code 1 if a check fails."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .text import paint, print_json, show_bytes

if TYPE_CHECKING:
    from ..bench.exactness import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the facts and checks as JSON")


def run(options: argparse.Namespace) -> int:
    from .doctor_facts import collect_facts, kept, verdicts, why_no_gpu

    facts = collect_facts()
    if options.json:
        checks = list(verdicts())
        shown = [_as_json(check) for check in checks]
        passed = all(check.passed for check in checks)
        print_json({**facts, "self_check": shown, "passed": passed, **kept()})
        return 0 if passed else 1
    for line in describe(facts, why_no_gpu()):
        print(line)
    passed = _show_checks(verdicts())
    for line in _kept(kept()):
        print(line)
    return 0 if passed else 1


def _as_json(check: Check) -> dict[str, Any]:
    """JSON has no NaN: an error that is none becomes null."""
    values = {name: value if value == value else None for name, value in asdict(check).items()}
    return {**values, "passed": check.passed}


def _show_checks(checks: Iterable[Check]) -> bool:
    """One line a check as it ends; the largest errors against what is tolerated."""
    print(paint("\nself-check against the definition", "bold"), "(largest errors: forward, gradients)")
    failed = total = 0
    for check in checks:
        mark = paint("ok  ", "green") if check.passed else paint("FAIL", "red")
        errors = f"{check.forward_error:.0e}, {check.gradient_error:.0e} (at most {check.tolerance:.0e})"
        print(f"  {mark} {check.title:<32} {errors}", flush=True)
        total, failed = total + 1, failed + (not check.passed)
    if failed:
        print(paint(f"\n{failed} of {total} checks failed: do not trust results on this machine.", "red"))
    else:
        print(paint(f"\nAll {total} checks passed.", "green"))
    return not failed


def describe(facts: Mapping[str, Any], why_no_gpu: str) -> Iterator[str]:
    """The facts as lines of text."""
    yield paint("versions", "bold")
    yield from _pairs(facts["versions"])
    yield paint("optional packages", "bold")
    for name, package in facts["packages"].items():
        yield f"  {name:<16} {package['version'] or 'not installed'} ({package['for']})"
    yield paint("machine", "bold")
    yield from _pairs(_machine(facts["machine"]))
    yield paint("GPUs", "bold")
    for gpu in facts["devices"]:
        memory = "" if gpu["memory_bytes"] is None else f", {show_bytes(gpu['memory_bytes'])}"
        yield f"  {gpu['device']:<16} {gpu['name']}{memory}"
    if not facts["devices"]:
        yield f"  none: {why_no_gpu}"
    yield paint("torch.distributed", "bold")
    backends = ", ".join(facts["distributed"]["backends"])
    yield f"  {backends or 'no backend: rings of several processes cannot run'}"
    yield paint("kernels", "bold")
    yield from _kernels(facts["kernels"])


def _kept(facts: Mapping[str, Any]) -> Iterator[str]:
    pool, cache = facts["memory_pool"], facts["pattern_cache"]
    yield paint("\nkept by this process after the checks", "bold")
    held, most = show_bytes(pool["total_allocated"]), show_bytes(pool["max_bytes"])
    plans, bytes_of_plans = cache["size"], show_bytes(cache["bytes"])
    yield from _pairs(
        {
            "memory pool": f"{held}, at most {most}; {pool['reuse_rate']:.0%} of requests reused memory",
            "pattern cache": f"{plans} plans of {bytes_of_plans}, at most {cache['max_size']} plans",
        }
    )


def _pairs(values: Mapping[str, Any]) -> Iterator[str]:
    width = max(16, *map(len, values))
    for name, value in values.items():
        yield f"  {name:<{width}} {value}"


def _machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    limit, physical = facts["memory_limit"], facts["memory_bytes"]
    memory = "unknown" if physical is None else show_bytes(physical)
    if limit is not None and physical is not None and limit < 0.99 * physical:
        memory += f", of which this process may use {show_bytes(limit)}"
    if facts["memory_available"] is not None:
        memory += f", {show_bytes(facts['memory_available'])} available"
    return {
        "cpu": f"{facts['cpu']} ({facts['cpu_capability']})",
        "cores": f"{facts['cores']}, {facts['usable_cores']} of them for this process",
        "threads": f"{facts['threads']} in a kernel, {facts['interop_threads']} between kernels",
        "load": facts["load"],
        "memory": memory,
        "NUMA nodes": facts["numa_nodes"],
    }


def _kernels(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """One line for all dtypes of a device of which the same can be said."""
    told: dict[tuple[str, str, str], list[str]] = {}
    for entry in entries:
        word = "taken by auto" if entry["chosen"] else f"cannot: {entry['why_not']}"
        if not entry["chosen"] and entry["why_not"] is None:
            word = "can run when named"
        told.setdefault((entry["kernel"], entry["device"], word), []).append(entry["dtype"])
    for (kernel, device, word), dtypes in told.items():
        yield f"  {kernel:<16} {device}, {' '.join(dtypes)}: {word}"
