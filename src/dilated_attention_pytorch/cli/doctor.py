"""Says what is installed, what this machine offers, which kernels can run here and why others cannot; then
checks the library against its definition, forward and gradients. Exit code 1 if a check fails."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .text import paint, print_json, show_bytes

if TYPE_CHECKING:
    from .bench.exactness import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the facts and checks as JSON")


def run(options: argparse.Namespace) -> int:
    from .doctor_facts import collect_facts, kept, verdicts, why_no_gpu

    facts = collect_facts()
    if options.json:
        checks = list(verdicts())
        passed = all(check.passed for check in checks)
        # JSON has no NaN: an error that is none becomes null.
        shown = [{name: x if x == x else None for name, x in asdict(check).items()} for check in checks]
        shown = [{**each, "passed": check.passed} for each, check in zip(shown, checks, strict=True)]
        print_json({**facts, "self_check": shown, "passed": passed, **kept()})
        return 0 if passed else 1
    for title, lines in describe(facts, why_no_gpu()).items():
        _print_section(title, lines)
    passed = _show_checks(verdicts())
    pool, cache = kept().values()
    held = f"{show_bytes(pool['total_allocated'])}, at most {show_bytes(pool['max_bytes'])}"
    plans = f"{cache['size']} plans of {show_bytes(cache['bytes'])}, at most {cache['max_size']} plans"
    values = {
        "memory pool": f"{held}; {pool['reuse_rate']:.0%} of requests reused memory",
        "pattern cache": plans,
    }
    _print_section("\nkept by this process after the checks", _pairs(values))
    return 0 if passed else 1


def _print_section(title: str, lines: Iterable[str]) -> None:
    print(paint(title, "bold"))
    for line in lines:
        print(f"  {line}")


def _pairs(values: Mapping[str, Any]) -> Iterator[str]:
    width = max(16, *map(len, values))
    return (f"{name:<{width}} {value}" for name, value in values.items())


def _show_checks(checks: Iterable[Check]) -> bool:
    """One line a check as it ends; the largest errors against what is tolerated."""
    print(paint("\nself-check against the definition", "bold"), "(largest errors: forward, gradients)")
    passed = []
    for check in checks:
        passed.append(check.passed)
        mark = paint("ok  ", "green") if check.passed else paint("FAIL", "red")
        errors = f"{check.forward_error:.0e}, {check.gradient_error:.0e} (at most {check.tolerance:.0e})"
        print(f"  {mark} {check.title:<32} {errors}", flush=True)
    failed, total = passed.count(False), len(passed)
    if failed:
        print(paint(f"\n{failed} of {total} checks failed: do not trust results on this machine.", "red"))
    else:
        print(paint(f"\nAll {total} checks passed.", "green"))
    return not failed


def describe(facts: Mapping[str, Any], why_no_gpu: str) -> dict[str, Iterable[str]]:
    """The facts as lines of text under their titles."""
    packages = {
        name: f"{x['version'] or 'not installed'} ({x['for']})" for name, x in facts["packages"].items()
    }
    gpus = {}
    for gpu in facts["devices"]:
        memory = "" if gpu["memory_bytes"] is None else f", {show_bytes(gpu['memory_bytes'])}"
        gpus[gpu["device"]] = gpu["name"] + memory
    backends = ", ".join(facts["distributed"]["backends"])
    return {
        "versions": _pairs(facts["versions"]),
        "optional packages": _pairs(packages),
        "machine": _pairs(_machine(facts["machine"])),
        "GPUs": _pairs(gpus) if gpus else [f"none: {why_no_gpu}"],
        "torch.distributed": [backends or "no backend: rings of several processes cannot run"],
        "kernels": _kernels(facts["kernels"]),
    }


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
        word = "can run when named" if entry["why_not"] is None else f"cannot: {entry['why_not']}"
        word = "taken by auto" if entry["chosen"] else word
        told.setdefault((entry["kernel"], entry["device"], word), []).append(entry["dtype"])
    return (f"{kernel:<16} {device}, {' '.join(x)}: {word}" for (kernel, device, word), x in told.items())
