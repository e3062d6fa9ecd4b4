"""A program of test_triton.py: compiles the kernels for GPUs that are not here, and reads them.

python triton_compile.py TARGET...      one JSON line for each shipped configuration of the targets
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dilated_attention_pytorch.kernels.triton import attend, gradients, tuning
from dilated_attention_pytorch.plan.runs import COLUMN

TARGETS = {name: GPUTarget("cuda", int(name[3:]), 32) for name in ("sm_80", "sm_90", "sm_100")}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
SIZES = {"fp16": 2, "bf16": 2, "fp32": 4}
FLOATS, INTEGERS = ("LSE", "DLSE", "DELTA", "MASK"), ("TILES", "JOBS", "RUNS", "KEYS", "VISITS")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MULTIPLIES = re.compile(r"[HIQ]G?MMA|UTC\w*MMA|v_mfma")


def source(which: tuning.Pass, target: str, dtype: str, d: int, blocks: tuning.Blocks, **given: Any) -> Any:
    """A kernel with the types and constants that a launch gives it."""
    kernel = getattr(attend if which == "attend" else gradients, which)
    p0, p1 = tuning.head_parts(d)
    constants: dict[str, Any] = {
        **dict.fromkeys(("CARRIES", "CAUSAL", "ONE_RUN"), True),
        **dict.fromkeys(("MASKED", "PHANTOM", "DROPS", "NEGATES", "HAS_DLSE", "WIDE"), False),
        **dict(zip(("D", "P0", "P1", "BLOCK_M", "BLOCK_N"), (d, p0, p1, *blocks[:2]), strict=True)),
        "OPENS": COLUMN["opens_queries"],
        "ALIGN": math.gcd(16, d),
        "PRECISION": tuning.precision(target),
        **given,
    }
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.isupper():
            signature[name] = "*i32" if name in INTEGERS else "*fp32" if name in FLOATS else f"*{dtype}"
            attributes[place,] = [["tt.divisibility", 16]]
        else:
            kinds = {"scale": "fp32", "scale_log2": "fp32", "gain": "fp32", "seed": "i64"}
            signature[name] = kinds.get(name, "i32")
    used = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return ASTSource(kernel, signature, used, attributes)


def compile_one(
    which: tuning.Pass, target: str, dtype: str, d: int, blocks: tuning.Blocks, **given: Any
) -> dict[str, Any]:
    """Registers, memory and instructions of a kernel."""
    began = time.perf_counter()
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    compiled = triton.compile(
        source(which, target, dtype, d, blocks, **given), target=TARGETS[target], options=options
    )
    facts = _read_amd(compiled) if target == "gfx942" else _read_nvidia(compiled)
    where = {"pass": which, "target": target, "dtype": dtype, "d": d, "blocks": list(blocks), **given}
    seconds = round(time.perf_counter() - began, 1)
    return {**where, "shared": compiled.metadata.shared, **facts, "seconds": seconds}


def _read_nvidia(compiled: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, listing = (
            subprocess.run([TOOLS / tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for tool, flag in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    label, line = r"\s*(\.L_x_\d+):", r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);"
    operations, labels = _parse(listing, label, line)
    loops = _loops(operations, labels, "BRA", "EXIT", r"\.L_x_\d+")
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        **_describe(operations, loops, r"LD[GS]|LDL|STL"),
    }


def _read_amd(compiled: Any) -> dict[str, Any]:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found is not None, name
        return int(found[1])

    operations, labels = _parse(text, r"(\.LBB\d+_\d+):", r"\s+([a-z]+_[\w.]+)\s*(.*)")
    loops = _loops(operations, labels, "s_c?branch", "s_endpgm", r"\.LBB\d+_\d+")
    facts = {"registers": number("vgpr_count"), "stack": number("private_segment_fixed_size")}
    return {**facts, **_describe(operations, loops, r"(global|buffer|scratch)_(load|store)")}


def _parse(text: str, label: str, line: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    operations: list[tuple[str, str]] = []
    labels = {}
    for each in text.splitlines():
        if found := re.match(label, each):
            labels[found[1]] = len(operations)
        elif found := re.match(line, each):
            operations.append((found[1], found[2]))
    return operations, labels


def _loops(
    operations: list[tuple[str, str]], labels: dict[str, int], branch: str, leave: str, label: str
) -> list[tuple[int, int]]:
    """The innermost loops that multiply. What lies behind the end of the program only waits."""
    end = max(i for i, (name, _) in enumerate(operations) if name.startswith(leave))
    found = []
    for i, (name, arguments) in enumerate(operations[:end]):
        target = re.search(label, arguments) if re.match(branch, name) else None
        if target and labels.get(target[0], i) < i:
            loop = labels[target[0]], i + 1
            if any(MULTIPLIES.match(x) for x, _ in operations[slice(*loop)]):
                found.append(loop)
    return [x for x in found if not any(y != x and y[0] >= x[0] and y[1] <= x[1] for y in found)]


def _describe(operations: list[tuple[str, str]], loops: list[tuple[int, int]], memory: str) -> dict[str, Any]:
    inside = [operations[i][0] for loop in loops for i in range(*loop)]
    return {
        "instructions": len(operations),
        "loops": [high - low for low, high in loops],
        "multiplies": sum(bool(MULTIPLIES.match(x)) for x in inside),
        "memory": dict(Counter(x for x in inside if re.match(memory, x))),
    }


def shipped(target: str) -> Any:
    """Every configuration that a launch may choose, at the largest head size that it holds for."""
    for (name, which, itemsize), row in tuning.TABLE.items():
        for d, blocks in row.items() if name == target else ():
            yield which, target, {2: "fp16", 4: "fp32"}[itemsize], d, blocks


def other_widths() -> Any:
    for d in (20, 40, 48, 72, 80, 96):
        yield "attend", "sm_80", "bf16", d, tuning.blocks_for("sm_80", "attend", 2, d)


if __name__ == "__main__":
    (target,) = sys.argv[1:]
    for given in other_widths() if target == "widths" else shipped(target):
        print(json.dumps(compile_one(*given)), flush=True)
