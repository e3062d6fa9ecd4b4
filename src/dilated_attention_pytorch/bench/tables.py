"""The record as Markdown: tables by kind of case, rendered from it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from .cases import Case, LongCase, MemoryCase, PoolCase, TimeCase, describe
from .cells import Table, mebibytes, milliseconds, number, shown, verdict
from .figures import Figure
from .forecast_cases import ForecastCase
from .limit_cases import LimitCase
from .measure import Timing
from .model_cases import DecodeCase, SlideCase, TrainCase
from .module_cases import CompareCase
from .module_tables import compare_table, limit_table
from .quality_cases import QualityCase
from .record import Record, Result
from .ring_cases import STRATEGIES, RingMemoryCase, RingStepsCase, RingTimeCase
from .sparse_cases import ModuleMemoryCase, PatternCase, SparseMemoryCase, SparseTimeCase
from .study_tables import forecast_table, quality_table

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
PLAN_BEGIN, PLAN_END = "<!-- plan:begin -->", "<!-- plan:end -->"


class Section(NamedTuple):
    """One kind of case: its title in Markdown, its table, and the sizes of its cases."""

    title: str
    table: Table
    descriptions: list[str]


def to_markdown(record: Record) -> str:
    """Tables by kind of case, and the sentence that says where they come from."""
    parts = []
    for section in make_sections(record):
        sizes = "\n".join(f"- {sentence}" for sentence in section.descriptions)
        parts += [section.title, str(section.table), sizes]
    return "\n\n".join([*parts, origin(record)]) + "\n"


def make_sections(record: Record) -> Iterator[Section]:
    """The kinds of cases that a record holds."""
    kinds: list[tuple[str, type[Case], Callable[[list[Result]], Table]]] = [
        ("**Time** over that of the bare kernel on ready-made tiles", TimeCase, _time_table),
        ("**Memory** that a call adds to its inputs", MemoryCase, _memory_table),
        ("**Pooled memory**: time and peak memory over those with fresh memory", PoolCase, _pool_table),
        ("**Long**: one call against as many short ones as give its length", LongCase, _long_table),
        ("**Block-sparse time** against dense attention of the same shape", SparseTimeCase, _sparse_table),
        ("**Block-sparse memory** that a call adds to its inputs", SparseMemoryCase, _sparse_memory_table),
        ("**Pattern builds** alone", PatternCase, _build_table),
        ("**Modules**: memory that a call adds, over the base", ModuleMemoryCase, _module_table),
        ("**Several ranks, time** over one process with as many threads", RingTimeCase, _ring_time_table),
        ("**Several ranks, memory**: that of all ranks over that of one", RingMemoryCase, _ring_memory_table),
        (
            "**One process in steps**: `RingDilatedAttentionV2` over the base",
            RingStepsCase,
            _ring_steps_table,
        ),
        ("**Decoding**: one step late in a stream over an early one", DecodeCase, _decode_table),
        ("**Training**: memory of a step beside weights and gradients", TrainCase, _train_table),
        ("**Slides**: memory of the whole process", SlideCase, _slide_table),
        ("**Modules compared**, on the same inputs", CompareCase, compare_table),
        ("**Limits**: the longest sequence within a budget of memory", LimitCase, limit_table),
        ("**Forecasts** of `plan` against what was measured", ForecastCase, forecast_table),
        ("**Quality**: the same model and bytes, trained with each attention", QualityCase, quality_table),
    ]
    for title, kind, table in kinds:
        results = [result for result in record.results if isinstance(result.case, kind)]
        if results:
            yield Section(title, table(results), _descriptions(results))


def replace_between_markers(text: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """The text with everything between the two markers, by default bench's, replaced by the table."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the text must hold one {begin} and after it one {end}")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{table.strip()}\n\n{end}{after}"


def _time_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        bare, dilated = (Timing(result.seconds[name]) for name in ("bare", "dilated"))
        minimum, median = result.figures
        speed = f"{result.counts['flops'] / dilated.minimum / 1e9:.0f}"
        times = [milliseconds(bare), milliseconds(dilated)]
        rows.append([result.case.name, *times, speed, number(minimum), number(median), verdict(minimum)])
    head = ["case", "bare, ms", "dilated, ms", "GFLOP/s", "ratio of minima", "of medians", "target"]
    return Table(head, rows)


def _memory_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        peak, nbytes = (mebibytes(result.counts.get(name)) for name in ("peak_extra", "results"))
        rows.append([result.case.name, peak, nbytes, *shown(result, result.figures[0])])
    return Table(["case", "peak extra, MiB", "results, MiB", "ratio", "target"], rows)


def _long_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        seconds = {name: f"{Timing(values).minimum:.2f} s" for name, values in result.seconds.items()}
        peak, minimum, _ = result.figures
        times = [seconds.get("base", ""), seconds.get("long", "")]
        rows.append([result.case.name, *shown(result, peak), *times, *shown(result, minimum)])
    head = ["case", "peak memory", "target", "short calls", "long call", "ratio of minima", "target"]
    return Table(head, rows)


def _pool_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        fresh = milliseconds(Timing(result.seconds["fresh"]))
        cells = [_pool_cell(figure) for figure in result.figures]
        peak = mebibytes(result.counts.get("peak_extra_fresh"))
        rows.append([result.case.name, fresh, *cells[:4], peak, *cells[4:]])
    head = ["case", "fresh, ms", "pool", "lightweight", "manager", "no plan cache"]
    return Table([*head, "fresh, extra MiB", "peak, pool", "peak, manager"], rows)


def _pool_cell(figure: Figure) -> str:
    return f"**{number(figure)}**" if figure.met is False else number(figure)


def _sparse_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        assert isinstance(result.case, SparseTimeCase)
        flops = {name: result.counts[f"flops {name}"] for name in result.seconds}
        timings = {name: Timing(values) for name, values in result.seconds.items()}
        rates = {name: flops[name] / timing.minimum / 1e9 for name, timing in timings.items()}
        figures = dict(zip([e.name for e in result.case.patterns], result.figures[::2], strict=True))
        for name, timing in timings.items():
            is_bare = name == "bare"
            density = "" if is_bare else f"{flops[name] / flops['dense']:.4f}"
            cells = [f"{result.case.name}, {name}", density, milliseconds(timing), f"{rates[name]:.0f}"]
            share = f"{rates[name] / rates['bare']:.2f}"
            found = [number(figures[name]), verdict(figures[name])] if name in figures else ["", ""]
            rows.append([*cells, share, *found])
    head = [
        "case and pattern",
        "density",
        "ms",
        "GFLOP/s",
        "of the bare rate",
        "speed-up over dense",
        "target",
    ]
    return Table(head, rows)


def _sparse_memory_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        names = ("peak_extra", "results", "pattern")
        peak, nbytes, pattern = (mebibytes(result.counts.get(name)) for name in names)
        memory, build = result.figures
        seconds = {name: f"{min(values):.3f}" for name, values in result.seconds.items()}
        times = [seconds.get(name, "") for name in ("build", "attention")]
        cells = [*shown(result, memory), pattern, *times, *shown(result, build)]
        rows.append([result.case.name, peak, nbytes, *cells])
    head = ["case", "peak extra, MiB", "out + lse, MiB", "ratio", "target"]
    return Table([*head, "pattern, MiB", "build, s", "attention, s", "ratio", "target"], rows)


def _build_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        seconds = [f"{min(values):.3f}" for values in result.seconds.values()] or [""]
        nbytes = mebibytes(result.counts.get("pattern"))
        rows.append([result.case.name, *seconds, nbytes, *shown(result, result.figures[0])])
    return Table(["case", "s", "pattern, MiB", "peak extra", "target"], rows)


def _module_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        names = ("peak_extra_module", "peak_extra_base")
        module, base = (mebibytes(result.counts.get(name)) for name in names)
        rows.append([result.case.name, module, base, *shown(result, result.figures[0])])
    return Table(["case", "peak extra, MiB", "of the base, MiB", "ratio", "target"], rows)


def _ring_time_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        alone = milliseconds(Timing(result.seconds["alone"])) if result.seconds else ""
        for strategy, minimum, median in zip(
            STRATEGIES, result.figures[::2], result.figures[1::2], strict=True
        ):
            ranks = milliseconds(Timing(result.seconds[strategy])) if result.seconds else ""
            received = mebibytes(result.counts.get(f"received {strategy}"))
            ratios = [*shown(result, minimum)[:1], number(median), verdict(minimum)]
            rows.append([f"{result.case.name}, {strategy}", alone, ranks, *ratios, received])
    head = ["case and strategy", "one process, ms", "ranks, ms", "ratio of minima", "of medians", "target"]
    return Table([*head, "received by a rank, MiB"], rows)


def _ring_memory_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        assert isinstance(result.case, RingMemoryCase)
        figures = [Figure("", 1.0 if result.counts else None), *result.figures]
        for size, figure in zip(result.case.ranks, figures, strict=True):
            names = ("peak", "tensors", "received")
            cells = [mebibytes(result.counts.get(f"{name} {size}")) for name in names]
            label = f"{result.case.name}, {size} rank{'' if size == 1 else 's'}"
            rows.append([label, *cells, *shown(result, figure)])
    head = ["case", "peak of a rank, MiB", "its tensors, MiB", "it receives, MiB", "times ranks, over one"]
    return Table([*head, "target"], rows)


def _ring_steps_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        assert isinstance(result.case, RingStepsCase)
        names = ["base", *map(str, result.case.ring_sizes)]
        figures = dict(
            zip(names[1:], zip(result.figures[::2], result.figures[1::2], strict=True), strict=True)
        )
        for name in names:
            peak = mebibytes(result.counts.get(f"peak_extra {name}"))
            times = milliseconds(Timing(result.seconds[name])) if name in result.seconds else ""
            if name == "base":
                rows.append([f"{result.case.name}, base", peak, "", "", times, ""])
                continue
            memory, time = figures[name]
            label = f"{result.case.name}, ring_size {name}"
            rows.append([label, peak, *shown(result, memory), times, number(time)])
    return Table(["case", "peak extra, MiB", "ratio", "target", "ms", "ratio of minima"], rows)


def _decode_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        assert isinstance(result.case, DecodeCase)
        late, alike, _ = result.figures
        figures = {"early": Figure("", 1.0 if result.seconds else None), "late": late, "alike": alike}
        for name, position in result.case.positions.items():
            times = milliseconds(Timing(result.seconds[name])) if result.seconds else ""
            held = mebibytes(result.counts.get(f"cache {name}"))
            rows.append([f"{result.case.name} at {position:,}", times, *shown(result, figures[name]), held])
    return Table(["case", "ms", "ratio of minima", "target", "cache, MiB"], rows)


def _train_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        for name in ("plain", "checkpointed"):
            names = ("peak_extra", "weights", "layer_inputs")
            cells = [mebibytes(result.counts.get(f"{each} {name}")) for each in names]
            times = milliseconds(Timing(result.seconds[f"step {name}"])) if result.seconds else ""
            rows.append([f"{result.case.name}, {name}", *cells, times])
    return Table(["case", "peak extra, MiB", "weights, MiB", "inputs of layers, MiB", "ms"], rows)


def _slide_table(results: Iterable[Result]) -> Table:
    rows = []
    for result in results:
        seconds = [f"{min(values):.1f}" for values in result.seconds.values()] or [""]
        parameters = f"{result.counts['parameters']:,}" if result.counts else ""
        rows.append([result.case.name, parameters, *seconds, *shown(result, result.figures[0])])
    return Table(["case", "parameters", "s", "peak memory", "target"], rows)


def _descriptions(results: Iterable[Result]) -> list[str]:
    """Sizes of the cases, each stated once with the cases that share them."""
    names: dict[str, list[str]] = {}
    for result in results:
        names.setdefault(describe(result.case), []).append(result.case.name)
    return [f"{', '.join(shared)}: {sizes}." for sizes, shared in names.items()]


def origin(record: Record) -> str:
    """Where the figures come from: version, machine and rounds."""
    project, machine = record.project, record.machine
    commit = f", commit {str(project['commit'])[:12]}" if project.get("commit") else ""
    changed = " with local changes" if project.get("changed") else ""
    dtypes = sorted({result.case.config.dtype for result in record.results}, reverse=True) or ["float32"]
    timed = [x for x in record.results if x.seconds and not isinstance(x.case, (QualityCase, LimitCase))]
    repeats = sorted({result.repeats for result in timed})
    word = "round" if repeats == [1] else "rounds"
    rounds = f", {' or '.join(map(str, repeats))} {word}" if repeats else ""
    has_spread = any(not isinstance(x.case, ForecastCase) for x in timed)
    legend = " Times: minimum (median ± half the quartile distance)." if has_spread else ""
    load = machine.get("load")
    busy = "" if load is None else f", load average {load} before the run"
    return (
        f"Version {project.get('version') or 'unknown'}{commit}{changed}; {' and '.join(dtypes)} on "
        f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('threads')} threads; "
        f"torch {machine.get('torch')}, {machine.get('os')}{rounds}{busy}.{legend}"
    )
