"""The suites of benchmarks/: their gates, what they count, their figures, and a quick run of each."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import cpu
import draw_patterns
import lengths
import memory
import models
import native
import pytest
import ranks
import ring_plans
import sparse
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention_pytorch import BlockPattern, block_sparse, functional
from dilated_attention_pytorch.cli.bench.gate import TOLERANCES, WrongAnswerError
from dilated_attention_pytorch.cli.bench.measure import Measured
from dilated_attention_pytorch.cli.bench.record import case_of, read_record
from dilated_attention_pytorch.core import AttentionBufferManager
from dilated_attention_pytorch.reference import multiplicity
from support.executions import FUSED
from support.pictures import find_maps, read_png
from support.suites import RESULTS, ROOT, SUITES, suite
from support.wrong_answers import WRONG, perturbed, spoil_last_row

CONFIG = common.Config(4, 8, (16, 40, 64), (1, 2, 4))
TIME = cpu.TimeCase("tiny", CONFIG, ((2, 100), (1, 37)), backward=True, repeats=1)
SPARSE = sparse.SparseConfig(2, 8, 8, "dilated_sparse", 0.3, (16, 64), (1, 2))
ENTRIES = (sparse.Entry("dilated_sparse", 0.3, 2.0), sparse.Entry("random", 0.2, 1.5))
SPARSE_TIME = sparse.SparseTimeCase("tiny", SPARSE, 101, ENTRIES, bare_n=32, backward=True, repeats=3)
RING = common.Config(4, 8, (16, 40, 200), (1, 2, 4))
RANKS = ranks.RingTimeCase("tiny ranks", RING, 200, backward=True, target=1.15)


def silent(text: str) -> None:
    """Where progress goes here."""


@pytest.mark.parametrize("name", SUITES)
def test_quick_run_writes_its_record_and_updates_a_page(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "record.json", tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- bench:begin -->\n<!-- bench:end -->\n\nThe end.\n")
    assert common.main(name, ["--quick", "--repeats", "2", "--out", str(out)]) == 0
    table, progress = capsys.readouterr()
    cases, quick, sections = (getattr(suite(name), each) for each in ("CASES", "QUICK", "SECTIONS"))
    for result, case in zip(read_record(out).results, quick, strict=True):
        assert result.name == case.name
        assert result.error is not None
        assert result.error < TOLERANCES[getattr(case.config, "dtype", "float32")]
        assert result.why_not is None
        assert result.name in table
        assert result.name in progress
    assert common.main(name, ["--render", str(out), "--update", str(page)]) == 0
    assert capsys.readouterr().out == table
    assert page.read_text() == (
        f"# Page\n\n<!-- bench:begin -->\n\n{table.strip()}\n\n<!-- bench:end -->\n\nThe end.\n"
    )
    assert common.main(name, ["--list"]) == 0
    assert f"{cases[0].name}: " in capsys.readouterr().out
    assert len({case.name for case in cases}) == len(cases)
    for case in (*cases, *quick):
        assert 1 in case.config.dilation_rates  # every position attends to something
        assert f"h = {case.config.h}" in sections[case.kind].describe(case_of(case))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "speed of light"], "no case has 'speed of light'"),
        (["--out", "no/such/place.json"], "there is no directory"),
        (["--update", "no-such-page.md"], "no-such-page.md"),
        (["--update", str(ROOT / "CHANGELOG.md")], "must hold one <!-- bench:begin -->"),
        (["--render", "no-such-record.json"], "no-such-record.json"),
    ],
)
def test_usage_errors_come_before_measuring(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "run", lambda *_: pytest.fail("measured in spite of a usage error"))
    with pytest.raises(SystemExit) as caught:
        common.main("cpu", arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_missed_target_is_no_failure_and_a_wrong_answer_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "QUICK", (replace(cpu.QUICK[0], target=1e-9),))
    assert common.main("cpu", ["--quick", "--repeats", "1"]) == 0
    assert "**not met**" in capsys.readouterr().out
    change = perturbed(functional.dilated_attention, WRONG["all of out"])
    monkeypatch.setattr(functional, "dilated_attention", change)
    record = tmp_path / "record.json"
    assert common.main("cpu", ["--quick", "--out", str(record)]) == 1
    captured = capsys.readouterr()
    assert "wrong answer: quick causal forward" in captured.err
    assert captured.out == ""
    assert not record.exists()


GATED = {
    "cpu": (cpu, TIME, functional, "dilated_attention"),
    "dense": (cpu, native.DenseCase("tiny", CONFIG, ((1, 100),), True), functional, "dilated_attention"),
    "sparse": (sparse, SPARSE_TIME, block_sparse, "block_sparse_attention"),
}


@pytest.mark.parametrize("wrong", [*WRONG, "at full length alone"])
@pytest.mark.parametrize("name", GATED)
def test_wrong_answers_are_not_timed(name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, case, where, function = GATED[name]
    change = perturbed(getattr(where, function), WRONG.get(wrong, spoil_last_row))
    monkeypatch.setattr(where, function, change)
    monkeypatch.setattr(module, "interleave", lambda *_, **__: pytest.fail("a wrong answer was timed"))
    if wrong not in WRONG:
        monkeypatch.setattr(module, "reduced_error", lambda *_, **__: 0.0)
    with pytest.raises(WrongAnswerError, match="tiny: the result is off by"):
        case.run(silent)


@pytest.mark.parametrize("name", ["cpu", "memory", "sparse", "models"])
def test_wrong_answer_in_a_child_is_not_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = suite(name)
    monkeypatch.setattr(module, "measure_in_child", lambda *_, **__: Measured(0.5, {"peak_extra": 1}))
    for case in module.QUICK:
        if case.kind not in ("time", "sparse time", "pattern"):
            with pytest.raises(WrongAnswerError, match=r"off by 5\.0e-01"):
                case.run(silent)


def test_memory_that_changes_the_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = memory.PoolCase("tiny", CONFIG, ((2, 100),), True)
    manager = AttentionBufferManager()
    assert memory.check(case, manager) < 2e-5
    right = functional.dilated_attention

    def wrong(*args: Any, **options: Any) -> Any:
        out, lse = right(*args, **options)
        return out + (0.0 if options["execution"].memory == "fresh" else 1e-7), lse

    monkeypatch.setattr(functional, "dilated_attention", wrong)
    with pytest.raises(WrongAnswerError, match="memory='pool' changes the result"):
        memory.check(case, manager)


def test_wrong_density_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"peak_extra": 1, "pattern": 1, "layouts": 1, "blocks": 25 * 25}
    monkeypatch.setattr(sparse, "measure_in_child", lambda *_, **__: Measured(counts=sizes))
    with pytest.raises(WrongAnswerError, match=r"tiny build: the density is 1\.0000 where 0\.3 was asked"):
        sparse.PatternCase("tiny build", SPARSE, 200).run(silent)
    denser = BlockPattern.from_layout(torch.ones(13, 13).bool(), 101, 8)
    monkeypatch.setattr(sparse.SparseConfig, "make_pattern", lambda *_: denser)
    with pytest.raises(WrongAnswerError, match=r"tiny, dilated_sparse 0\.3: the density is"):
        SPARSE_TIME.run(silent)


class CountPairs(TorchDispatchMode):
    """Counts the query-key pairs that flash kernels see, and calls of anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_pairs = self.backward_pairs = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == common.FORWARD_OP:
            self.forward_pairs += args[0].shape[:3].numel() * args[1].shape[2]
        elif func == common.BACKWARD_OP:
            self.backward_pairs += args[1].shape[:3].numel() * args[2].shape[2]
        else:
            self.others += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backward", [False, True])
def test_bare_kernel_does_the_work_of_the_plan_and_every_call_is_made(
    backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(TIME, backward=backward, new_lengths=True)
    run = cpu.bare_candidate(case)
    with CountPairs() as counter:
        run()
    assert counter.others == 0
    assert (counter.backward_pairs > 0) == backward
    pairs = 2 * counter.forward_pairs + 5 * counter.backward_pairs
    assert 2 * CONFIG.d * pairs == cpu.count_flops(case)
    sizes = []
    right = common.attend
    monkeypatch.setattr(common, "attend", lambda c, *qkv: sizes.append(tuple(qkv[0].shape)) or right(c, *qkv))
    cpu.dilated_candidate(case)()
    assert sizes == [(2, 100, 4, 8), (1, 37, 4, 8)]


def test_arena_cuts_distinct_tensors_and_starts_over_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "ARENA_NUMEL", 10)
    arena = common.Arena([(2, 3), (4,), (5,), (6, 2)], seed=0)
    assert arena.memory.numel() == 12  # the largest tensor decides where the bound is too small for it
    starts = [arena.take(shape).storage_offset() for shape in [(2, 3), (4,), (5,), (6, 2)]]
    assert starts == [0, 6, 0, 0]


def test_block_sparse_flops_and_rounds_are_of_what_is_kept() -> None:
    found = SPARSE_TIME.run(silent)
    rounds = {name: len(values) for name, values in found.seconds.items()}
    assert rounds == {"dense": 2, "bare": 3, "dilated_sparse 0.3": 3, "random 0.2": 3}
    assert [figure.target for figure in SPARSE_TIME.figures(found)] == [2.0, None, 1.5, None]
    each = 2 * 7 * 8
    assert found.counts["flops dense"] == each * 2 * 101**2
    assert found.counts["flops bare"] == each * 2 * 32**2
    kept = replace(SPARSE, pattern_type="random", sparsity_ratio=0.2).make_pattern(101).to_dense().sum()
    assert found.counts["flops random 0.2"] == each * int(kept)


def test_dense_attention_of_a_shorter_length_is_scaled_by_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    clocked = partial(sparse.interleave, clock=lambda: float(next(ticks)))
    monkeypatch.setattr(sparse, "interleave", clocked)
    with CountPairs() as counter:
        found = replace(SPARSE_TIME, n=128, dense_n=32, dense_repeats=3, backward=False).run(silent)
    assert set(found.seconds["dense"]) == {16.0}
    assert set(found.seconds["random 0.2"]) == {1.0}
    assert found.counts["flops dense"] == 4 * 8 * 2 * 128**2
    assert counter.forward_pairs >= 3 * 2 * 32**2


def test_the_share_of_the_peak_is_of_the_pairs_that_are_scored() -> None:
    case = native.PeakCase("tiny", replace(CONFIG, segment_lengths=(32, 64, 128)), ((2, 256),), repeats=1)
    counts = multiplicity(256, 4, *case.config.branches)
    found = case.run(silent)
    scored = int((counts > 0 if "native" in FUSED else counts).sum())
    assert found.counts["flops scored"] == 2 * 2 * 8 * 2 * scored
    assert found.counts["flops"] == 2 * 2 * 8 * 2 * int(counts.sum())
    seconds = {"dilated": (2.0,), "product": (1.0,)}
    (share,) = case.figures(replace(found, seconds=seconds))
    assert share.value == found.counts["flops scored"] / 2 / (2 * native.MATRIX**3)


def test_a_short_call_is_one_of_many_and_speed_is_over_the_baseline() -> None:
    case = native.ShortCase("tiny", CONFIG, ((1, 64),) * 4, repeats=2)
    single = case.figures(Measured(0.0, {}, {"sdpa": (1.0,), "dilated": (2e-5, 3e-5)}))
    assert [(x.value, x.unit) for x in single] == [(pytest.approx(20.0), "us")]
    seconds = {"sdpa": (3.0, 4.0), "dilated": (1.0, 3.0)}
    figures = native.DenseCase("tiny", CONFIG, ((1, 64),), target=2.5).figures(Measured(0.0, {}, seconds))
    assert [(x.value, x.met) for x in figures] == [(3.0, True), (1.75, None)]


def test_ranks_are_checked_against_one_process_and_their_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = ranks.Rank(RANKS, 0, 1)
    assert rank.check(RING, 200, "ring") < 2e-5
    held = ranks.Rank(replace(RANKS, backward=True), 0, 1).measure_memory("ring")
    assert isinstance(held, dict)
    assert (held["tensors"], held["received"]) == (8 * 4 * 200 * 4 * 8, 0)  # four inputs and four results
    ranks.ring_traffic().reset()
    with pytest.raises(RuntimeError, match=r"rank 0 received 0 bytes where \d+ were planned"):
        ranks.Rank(RANKS, 0, 2).check_traffic(RING, 200, "ring")  # two ranks by name, and no transfer at all
    right = ranks.ring_dilated_attention
    monkeypatch.setattr(ranks, "ring_dilated_attention", lambda *a, **o: right(*a, **o) + 1e-3)
    assert rank.check(RING, 200, "ring") > 2e-5
    group: Any = ranks.Group()
    for error in (0.5, math.inf):
        group.ask = lambda *_, error=error, **__: [0.0, error]
        with pytest.raises(WrongAnswerError, match="tiny ranks: the result is off by"):
            ranks.check_ranks(RANKS, group, RING, 200)
    for case in ranks.CASES:
        config, n = ranks.reduced(case)
        assert (n % 2, config.dilation_rates) == (1, case.config.dilation_rates)
        assert min(config.segment_lengths) < n // 4
    tensors = [ranks.make_tensors(RING, 10, seed=seed)[0] for seed in (0, 1)]
    assert not torch.equal(*tensors)


def test_a_rank_that_fails_says_so() -> None:
    failed = pytest.raises(RuntimeError, match="a rank ended with status 1")
    with failed, ranks.start_group(RANKS, 1, 1) as group:
        group.ask("nonsense")


def test_steps_in_one_process_are_measured_and_timed() -> None:
    case = ranks.RingStepsCase("tiny steps", RING, 200, (2, 8), target=1.05)
    for variant in case.variants:
        found = ranks.measure_module(case, variant)
        assert found.counts["results"] == 4 * 200 * 4 * 8
        assert found.error is not None
        assert found.error < 2e-5
    timed = ranks.time_modules(replace(case, backward=True, repeats=2))
    assert {name: len(values) for name, values in timed.seconds.items()} == {"base": 2, "2": 2, "8": 2}
    assert ranks.make_module(RING, "8").ring_size == 8


DECODE, TRAIN, _ = models.QUICK


@pytest.mark.parametrize("n", [0, 1, 127, 128, 300])
def test_a_decoding_step_is_held_to_the_definition(n: int) -> None:
    cache = models.filled_cache(DECODE.config, n)
    assert models.step_error(DECODE.config, cache) < 2e-5
    assert cache.num_tokens == n + 1
    if n == 300:  # what lies before the longest segment does not matter
        late = models.filled_cache(DECODE.config, n, first=256, kernel="stock")
        assert models.step_error(DECODE.config, late) < 2e-5
    for buffer in cache._buffers.values():
        buffer[0, :, :, 0] += 1.0
    assert n != 300 or models.step_error(DECODE.config, cache) > 1e-3


def test_a_gradient_that_is_missing_or_wrong_is_noticed() -> None:
    weight = next(models.make_model(TRAIN, False).parameters()).detach()
    assert models.scaled_error(None, weight) == math.inf
    assert models.scaled_error(weight * 1.001, weight * 1.0) > 2e-4
    assert models.scaled_error(weight * 1e-9, weight * 1e-9) < 1e-6
    positions, period = DECODE.positions, max(DECODE.config.segment_lengths)
    assert positions["alike"] >= positions["late"] > positions["early"]
    assert positions["alike"] % period == positions["early"] % period


def test_figures_that_could_not_be_measured_are_none() -> None:
    memory_of_ranks = ranks.RingMemoryCase("m", RING, 200, target=1.15)
    for case in (sparse.SparseMemoryCase("m", SPARSE, 200), memory_of_ranks):
        assert {(x.value, x.met) for x in case.figures(Measured(why_not="no"))} == {(None, None)}


PLAN_BEGIN, PLAN_END = "<!-- plan:begin -->", "<!-- plan:end -->"


def test_plans_in_the_documentation_are_those_of_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    documented = (ROOT / "docs" / "distributed.md").read_text()
    table = documented.partition(PLAN_BEGIN)[2].partition(PLAN_END)[0].strip()
    page = tmp_path / "page.md"
    page.write_text(f"before\n{PLAN_BEGIN}\n{PLAN_END}\nafter\n")
    ring_plans.main(["--update", str(page)])
    assert table in page.read_text()
    assert capsys.readouterr().out.strip() == table
    assert [line.split()[1] for line in table.splitlines()[2:10:2]] == list(map(str, ring_plans.RANKS))


def test_pictures_are_those_that_the_library_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw_patterns.main([str(tmp_path)])
    images = ROOT / "docs" / "images"
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in images.glob("pattern_*.png"))
    assert sorted(Path(line).name for line in capsys.readouterr().out.split()) == drawn
    for name in drawn:
        assert (images / name).stat().st_size < 30_000
        drawn_map, shown_map = (find_maps(read_png(place / name), 256) for place in (tmp_path, images))
        # The letters are those of a version of matplotlib.
        assert torch.equal(drawn_map[0], shown_map[0]), name
    shown = re.findall(r'src="images/pattern_(\w+)\.png"', (ROOT / "docs" / "block_sparse.md").read_text())
    assert sorted(shown) == sorted(draw_patterns.example_patterns())
    with pytest.raises(SystemExit):
        draw_patterns.main([str(tmp_path / "none")])


def test_picture_of_the_readme_shows_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn, shown = tmp_path / "lengths.svg", ROOT / "docs" / "images" / "lengths.svg"
    assert common.main("lengths", ["--render", "--picture", str(drawn)]) == 0
    titles = [re.findall(r"<title>(.*?)</title>", path.read_text()) for path in (drawn, shown)]
    assert titles[0] == titles[1]  # a point each; where it lies depends on the version of matplotlib
    record = read_record(RESULTS / "lengths.json")
    assert len(titles[0]) == sum(len(result.seconds) for result in record.results)
    least = min(record.results[0].seconds["sdpa"])
    assert titles[0][0] == f"{lengths.NAMES['sdpa']}: 1,024, {1e3 * least:,.0f}"
    assert "currentColor" not in drawn.read_text()
    with pytest.raises(SystemExit):
        common.main("cpu", ["--render", "--picture", str(drawn)])
    assert "--picture" in capsys.readouterr().err
