"""Dilated attention in every family of the installed transformers, against the family's own eager attention.

    python benchmarks/transformers_sweep.py --update docs/huggingface.md
    python benchmarks/transformers_sweep.py --family llama --family bert

A small random model of each family runs with one branch that spans its input at rate 1, which is dense
attention, and with "eager": without padding, with padding on the right and on the left, and its gradient.
All results must be equal where dilated attention does not refuse.
"""

from __future__ import annotations

import argparse
import collections
import difflib
import json
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from common import update_page
from tiny_models import Inputs, NotBuilt, families, padding, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from dilated_attention_pytorch.cli.bench.machine import machine_facts, project_facts
from dilated_attention_pytorch.integrations import transformers as integration

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "transformers.json"
FULL = {"segment_lengths": [2**20], "dilation_rates": [1]}
ALONE = {"segment_lengths": [1], "dilation_rates": [1], "allow_isolated_segments": True}
TOLERANCE = 1e-4  # of the largest value, in float32
FINE_TOLERANCE = 1e-9  # in float64
SECONDS = 60  # for a family
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"
OUTCOMES = {
    "equal": "equal",
    "equal, own": 'equal, with `"sliding_layers": "own"`',
    "equal, sdpa": "equal to its sdpa attention, which its eager attention is not",
    "refused": "refused with an error",
    "own": "has no attention of the registry",
    "differs": "differs",
    "crashes": "fails inside of the model",
    "not built": "no small model of it",
}


class OutOfTime(BaseException):
    """Not an Exception, which those who try several models would catch."""


def check_family(family: Any) -> dict[str, Any]:
    """What comes out for one family: an outcome, its reason, and the largest error by case."""
    try:
        model, inputs = tiny_model(family)
    except NotBuilt as error:
        return {"outcome": "not built", "reason": _first_line(error)}
    result = compare(model, inputs, FULL)
    if result["outcome"] == "differs":  # or float32 is too coarse for this model, whatever its attention
        exact = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
        again = compare(model.double(), exact, FULL, FINE_TOLERANCE)
        result = {**again, "float32": result["errors"]}
        if again["outcome"] == "differs":
            sdpa = compare(model, exact, FULL, FINE_TOLERANCE, own="sdpa")
            result = {**result, "outcome": "equal, sdpa"} if sdpa["outcome"] == "equal" else result
    if "sliding window" in result["reason"]:
        own = compare(model, inputs, {**FULL, "sliding_layers": "own"})
        if own["outcome"] == "equal":
            return {**own, "outcome": "equal, own", "reason": result["reason"]}
    return result


def compare(
    model: PreTrainedModel,
    inputs: Inputs,
    settings: dict[str, Any],
    tolerance: float = TOLERANCE,
    own: str = "eager",
) -> dict[str, Any]:
    """Outcome, reason and the largest relative error of each case."""
    errors: dict[str, float] = {}
    for case, options in cases(model, inputs):
        model.set_attn_implementation(own)
        try:
            expected = outputs(model, inputs | options)
        except Exception as error:
            if case == "no padding":
                return {"outcome": "not built", "reason": f"eager: {_first_line(error)}", "errors": errors}
            continue  # padding that the model does not take, or that it does not show
        with counted_calls() as calls:
            try:
                integration.use_dilated_attention(model, settings)
                actual = outputs(model, inputs | options)
            except Exception as error:
                return _failure(case, error, errors)
        if not calls:
            return {"outcome": "own", "reason": "no layer called the registered attention", "errors": errors}
        errors[case] = max(relative_error(a, b) for a, b in zip(actual, expected, strict=True))
        integration.use_dilated_attention(model, {**settings, **ALONE})
        if relative_error(outputs(model, inputs | options)[0], expected[0]) < 100 * tolerance:
            return {"outcome": "not built", "reason": "attention does not matter in it", "errors": errors}
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= tolerance:
        return {"outcome": "differs", "reason": f"{worst}: by {errors[worst]:.1e}", "errors": errors}
    return {"outcome": "equal", "reason": "", "errors": errors}


def cases(model: PreTrainedModel, inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    yield "no padding", {}
    if "input_ids" in inputs:
        for side in ("right", "left"):
            yield f"{side} padding", {"attention_mask": padding(side)}


def _failure(case: str, error: Exception, errors: dict[str, float]) -> dict[str, Any]:
    text = _first_line(error)
    if "AttentionInterface" in text:
        return {"outcome": "own", "reason": text, "errors": errors}
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    refused = isinstance(error, ValueError) and Path(raised_in).parent == Path(integration.__file__).parent
    shown = text if refused else f"{type(error).__name__}: {text}"
    return {"outcome": "refused" if refused else "crashes", "reason": f"{case}: {shown}", "errors": errors}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def outputs(model: PreTrainedModel, inputs: Inputs) -> list[Tensor]:
    """The first output, or the first at tokens alone where there is padding, and the gradient of its sum."""
    torch.manual_seed(2)  # some models draw what they mask
    model.zero_grad()
    mask = inputs.get("attention_mask")
    found = (x for x in _floats(model(**inputs)) if mask is None or x.shape[:2] == mask.shape)
    main = next(found, None)
    if main is None:
        raise LookupError("no output has an entry a token")
    if mask is not None:
        main = main[mask.bool()]
    if not main.requires_grad:
        return [main]
    finite = main[torch.isfinite(main)]
    weight = torch.randn(finite.shape, generator=torch.Generator().manual_seed(3))
    (finite * weight.to(finite.dtype)).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [main.detach(), torch.cat(gradients)]


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _floats(part)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.double(), expected.double()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    difference = (actual - expected).abs().masked_fill(same, 0.0)
    scale = expected[torch.isfinite(expected)].abs().max().item() if expected.numel() else 1.0
    return float((difference.max() if difference.numel() else difference.sum()).item() / max(scale, 1e-6))


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Lengths of the calls that reached dilated attention."""
    calls: list[int] = []
    attend = integration.attend_rows

    def counted(q: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(q.shape[1])
        return attend(q, *args, **options)

    integration.attend_rows = counted
    try:
        yield calls
    finally:
        integration.attend_rows = attend


def sweep(names: list[str]) -> dict[str, dict[str, Any]]:
    """Results by family; progress goes to stderr."""
    known = families(names)
    if any(name not in known for name in names):
        known = families()  # a part of another family, or a typing error
    if unknown := [name for name in names if name not in known]:
        close = difflib.get_close_matches(unknown[0], known, 3)
        raise SystemExit(
            f"no family {unknown[0]!r} in transformers {transformers.__version__}, near: {close}"
        )
    results: dict[str, dict[str, Any]] = {}
    chosen = names or list(known)
    for number, name in enumerate(chosen, 1):
        start = time.perf_counter()
        try:
            with time_limit():
                results[name] = check_family(known[name])
        except OutOfTime:
            results[name] = {"outcome": "not built", "reason": f"took more than {SECONDS} s"}
        took = time.perf_counter() - start
        print(f"[{number}/{len(chosen)}] {name}: {results[name]['outcome']}, {took:.1f} s", file=sys.stderr)
        if results[name]["outcome"] in ("refused", "crashes", "differs"):
            print(f"    {results[name]['reason']}", file=sys.stderr)
    return results


@contextmanager
def time_limit() -> Iterator[None]:
    """Ends what hangs, where the system has alarms."""

    def stop(*_: Any) -> None:
        raise OutOfTime

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def render(record: dict[str, Any]) -> str:
    """The tables of a record, as Markdown."""
    outcomes, reasons = collections.defaultdict(list), collections.defaultdict(list)
    for name, result in record["families"].items():
        outcomes[result["outcome"]].append(name)
        if result["outcome"] == "refused":
            reasons[_rule(result["reason"])].append(name)
    lines = ["| outcome | families |", "|---|---|"]
    lines += [f"| {text} | {len(outcomes[key])} |" for key, text in OUTCOMES.items() if outcomes[key]]
    for key in ("equal", "equal, own", "equal, sdpa", "differs", "crashes", "own"):
        if outcomes[key]:
            lines += ["", f"{OUTCOMES[key].capitalize()}: {', '.join(outcomes[key])}."]
    if reasons:
        lines += ["", "| refused | families |", "|---|---|"]
    ordered = sorted(reasons.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    lines += [f"| {reason} | {', '.join(names)} |" for reason, names in ordered]
    commit, versions = str(record["project"]["commit"])[:10], f"transformers {record['transformers']}"
    return "\n".join([*lines, "", f"{versions}, torch {record['machine']['torch']}; commit {commit}."])


def _rule(reason: str) -> str:
    """A refusal without the case and without what was got."""
    rule = re.sub(r"^\w+ padding: |,? got .*$", "", reason)
    rule = re.sub(r": \w+ must be None|,? \([^()]*\)", "", rule)
    return rule.removeprefix("dilated attention ").strip(", ")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--record", type=Path, help=f"where to write the record ({RECORD.relative_to(ROOT)})")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="renders the record into a page")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    results = sweep(options.family)
    record = {
        "transformers": transformers.__version__,
        "project": project_facts(),
        "machine": machine_facts(),
        "tolerance": TOLERANCE,
        "families": results,
    }
    path = options.record or (None if options.family else RECORD)  # a part is not the record of all
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")
    if options.update is not None:
        update_page(options.update, render(record), "families")
    print(render(record))
    return int(any(result["outcome"] in ("differs", "crashes") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
