"""Compiles the Triton kernels for GPUs that are not here, and reads what they became.

python benchmarks/triton_compile.py              writes the record, and its table into docs/gpu.md
python benchmarks/triton_compile.py TARGET       a JSON line for each configuration of a target, and for some
                                                 with other options and head sizes
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.kernels.triton import tuning
from dilated_attention_pytorch.plan.runs import COLUMN

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE = ROOT / "benchmarks" / "results" / "triton.json", ROOT / "docs" / "gpu.md"
TRITON_BEGIN, TRITON_END = "<!-- triton:begin -->\n", "<!-- triton:end -->"
TARGETS: dict[tuning.Target, tuple[Any, ...]] = {  # backend, architecture, threads of a warp
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
FLOATS, INTEGERS = ("LSE", "DLSE", "DELTA", "MASK"), ("TILES", "JOBS", "RUNS", "KEYS", "VISITS")
READER = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # what it reads depends on this file
MULTIPLIES = re.compile(r"[HIQ]G?MMA|UTC\w*MMA|v_mfma")


def source(which: tuning.Pass, target: str, dtype: str, d: int, blocks: tuning.Blocks, **given: Any) -> Any:
    """A kernel with the types and constants that a launch gives it."""
    from triton.compiler import ASTSource

    from dilated_attention_pytorch.kernels.triton import attend, gradients

    kernel = getattr(attend if which == "attend" else gradients, which)
    p0, p1 = tuning.head_parts(d, 4 if dtype == "fp32" else 2)
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
    """Registers, memory and instructions of a kernel, kept beside it in Triton's cache: by content."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.cache import get_cache_manager

    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    compiled = triton.compile(
        source(which, target, dtype, d, blocks, **given), target=GPUTarget(*TARGETS[target]), options=options
    )
    cache, name = get_cache_manager(compiled.hash), f"facts-{READER}.json"
    if (file := cache.get_file(name)) is None:
        facts = _read_amd(compiled) if target == "gfx942" else _read_nvidia(compiled)
        file = cache.put(json.dumps({"shared": compiled.metadata.shared, **facts}), name, binary=False)
    where = {"pass": which, "target": target, "dtype": dtype, "d": d, "blocks": list(blocks), "given": given}
    return {**where, **json.loads(Path(file).read_text())}


def _read_nvidia(compiled: Any) -> dict[str, Any]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, listing = (
            subprocess.run(
                [tools / tool, *flags, file.name], capture_output=True, text=True, check=True
            ).stdout
            for tool, *flags in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c", "-ndf"))
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
    end = max(
        (i for i, (name, _) in enumerate(operations) if name.startswith(leave)), default=len(operations)
    )
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


def others(target: str) -> Any:
    """Options of the main configurations; and head sizes of which the last vector is not full."""
    drops, masked, plain = {"DROPS": True}, {"MASKED": True}, {"CAUSAL": False, "CARRIES": False}
    for which, dtype, d, given in (
        ("attend", "fp16", 64, drops),
        ("attend", "fp16", 128, masked),
        ("query_gradients", "fp16", 64, masked),
        ("query_gradients", "fp16", 128, drops),
        ("key_gradients", "fp16", 64, drops),  # whose loops know of no mask
        ("key_gradients", "fp16", 128, drops),
        ("attend", "bf16", 20, plain),
        ("query_gradients", "bf16", 40, plain),
        ("key_gradients", "bf16", 72, plain),
    ):
        yield (which, target, dtype, d, tuning.blocks_for(target, which, 2, d)), given


def loaded(
    which: tuning.Pass, target: str, dtype: str, d: int, blocks: tuning.Blocks | list[int]
) -> tuple[int, int]:
    """Bits of the loads in a loop, of keys and values or of queries and gradients, and how many there are.

    A vector holds no more than rows are aligned to, and no more than the share of a thread in a tile.
    """
    queries, keys, warps, _ = blocks
    rows, threads = queries if which == "key_gradients" else keys, warps * TARGETS[target][2]
    size = 4 if dtype == "fp32" else 2
    shares = [rows * part // threads for part in tuning.head_parts(d, size) if part]
    bits = min(128, 8 * size * math.gcd(16, d), 8 * size * min(shares))
    return bits, 2 * sum(shares) * 8 * size // bits


def write_record() -> None:
    import triton

    kept = ("target", "pass", "dtype", "d", "blocks", "registers", "stack", "shared", "loops")
    found = [compile_one(*given) for target in TARGETS for given in shipped(target)]
    lines = ",\n".join(json.dumps({name: x[name] for name in kept}) for x in found)
    RECORD.write_text(f'{{"triton": "{triton.__version__}", "compiled": [\n{lines}\n]}}\n')
    before, _, rest = PAGE.read_text().partition(TRITON_BEGIN)
    PAGE.write_text(before + TRITON_BEGIN + render() + TRITON_END + rest.partition(TRITON_END)[2])


def render() -> str:
    """The record as a table."""
    head = (
        "target",
        "dtype",
        "pass",
        "head size",
        "queries x keys, warps, stages",
        "registers",
        "stack",
        "shared",
    )
    rows = [head, ("---", "---", "---", "---:", "---", "---:", "---:", "---:")]
    for x in json.loads(RECORD.read_text())["compiled"]:
        memory = x["registers"], f"{x['stack']} B", f"{x['shared'] / 1024:.0f} KiB"
        rows.append((x["target"], x["dtype"], f"`{x['pass']}`", x["d"], tuning.Blocks(*x["blocks"]), *memory))
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows).replace("\t", ", ")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        write_record()
    for target in sys.argv[1:]:
        for what, given in (*((x, {}) for x in shipped(target)), *others(target)):
            print(json.dumps(compile_one(*what, **given)), flush=True)
