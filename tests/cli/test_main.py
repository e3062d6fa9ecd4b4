"""The command line as a whole: commands found lazily, mistakes explained, exit codes, speed of the help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dilated_attention_pytorch import __version__
from dilated_attention_pytorch.cli import main as cli
from dilated_attention_pytorch.cli.main import COMMANDS, EXTRAS, main, make_parser
from dilated_attention_pytorch.cli.text import byte_count

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
from dilated_attention_pytorch.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def run_program(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-m", "dilated_attention_pytorch"] if code is None else ["-c", code]
    command = [sys.executable, "-W", "error", *start, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def test_help_and_version_need_no_torch() -> None:
    result = run_program("--help", code=WITHOUT_TORCH)
    assert (result.returncode, result.stderr) == (0, "")
    for name, text in COMMANDS.items():
        assert re.search(rf"  {name} +{re.escape(text)}\n", result.stdout)
    result = run_program("--version", code=WITHOUT_TORCH)
    assert (result.returncode, result.stdout) == (0, f"dilated-attention {__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_needs_no_torch(name: str) -> None:
    result = run_program(name, "--help", code=WITHOUT_TORCH)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: dilated-attention {name}")


def test_help_answers_within_its_time() -> None:
    seconds = []
    for _ in range(3):
        before = os.times()
        assert run_program("--help").returncode == 0
        after = os.times()
        # Time of the processor: what others do on this machine does not count.
        used = after.children_user + after.children_system - before.children_user - before.children_system
        seconds.append(used)
    assert min(seconds) < 0.3


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("shwo", "there is no command 'shwo'. Did you mean show? There are demo, doctor"),
        ("--verbose", "--verbose is no option, and a command is missing"),
        ("--json doctor", "--json is no option of dilated-attention; options of a command come after it"),
        ("doctor --jsno", "dilated-attention doctor: error: unknown option --jsno; did you mean --json?"),
    ],
)
def test_usage_errors_say_what_is_wrong_without_torch(command_line: str, message: str) -> None:
    result = run_program(*command_line.split(), code=WITHOUT_TORCH)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("PLAN", "there is no command 'PLAN'. Did you mean plan?"),
        ("plan", "the following arguments are required: --length"),
        ("plan --length 0", "a positive whole number is needed, as 4096, 4k or 1M, got '0'"),
        ("plan --length 1k --memory 8_apples", "a size is needed, as 8GiB, 512MiB or 16GB, got '8_apples'"),
        ("plan --lenght 4k", "plan: error: unknown option --lenght; did you mean --length?"),
        ("show --segment 8", "show: error: unknown option --segment; did you mean --segments?"),
        ("show --head_offsets=x", "show: error: unknown option --head_offsets; did you mean --offsets?"),
        ("show -length 8", "unknown option -length; did you mean --length?"),
        ("bench --dilation-rates 1", "unknown option --dilation-rates; did you mean --rates?"),
        ("train x --out y --segment-lengths 8", "did you mean --segments?"),
        ("train x --out y --lr 1", "unknown option --lr; see --help"),
        (
            "train x --out y --segments 64 256",
            "unrecognized arguments: 256; lists are written with commas, as 64,256",
        ),
        ("show --length 64,256", "a whole number is needed, as 4096, 4k or 1M, got '64,256'"),
        ("bench --lengths 1,048,576", "commas separate the numbers of a list, got '048'"),
        ("plan --length 1k --memory 24", "--memory: 24 is 24 bytes; did you mean 24GiB?"),
        ("plan --length 1k --memory 8192", "8192 is 8192 bytes; did you mean 8192MiB?"),
        ("bench --limit 8", "--limit: 8 is 8 bytes; did you mean 8GiB?"),
    ],
)
def test_mistakes_come_with_what_was_likely_meant(
    command_line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command_line.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command_line",
    [
        "show --out pictures/a.png",
        "show --out a.png --segments 8 --rates 1,2",
        "show --out a.svg --length 100k",
        "demo --out reports/a.html",
        "demo --out a.html --seconds 0",
        "bench sdpa --html pages/a.html",
        "bench sdpa --html a.html --out a.json --segments 64",
        "train nowhere --out runs/a",
        "train . --out runs/a --nhead 3",
        "generate runs/a",
    ],
)
def test_a_refused_command_leaves_nothing_behind(
    command_line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command_line.split()) in (1, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_value_is_no_option(command: ModuleType) -> None:
    command.add_arguments = lambda parser: parser.add_argument("--text")  # type: ignore[attr-defined]
    command.run = lambda options: 0  # type: ignore[attr-defined]
    for words in (["--text", "--two words"], ["--text=--word"], ["--text", "-1"]):
        assert main(["probe", *words]) == 0


@pytest.mark.parametrize("name", ["show", "plan", "bench", "train"])
def test_branches_and_lengths_are_spelled_alike(name: str) -> None:
    parser = make_parser(name)
    arguments = ["--segments", "64,1k", "--rates", "1,4"]
    if name == "train":
        options = parser.parse_args(["x", "--out", "y", *arguments, "--context-length", "4k"])
        assert (options.segment_lengths, options.dilation_rates) == ((64, 1024), (1, 4))
        assert options.context_length == 4096
        return
    for flag in ("--length", "--lengths"):
        options = parser.parse_args([flag, "1M", *arguments])
        assert (options.segments, options.rates) == ((64, 1024), (1, 4))
        assert getattr(options, "length", None) == 2**20 or options.lengths == (2**20,)


def test_sizes() -> None:
    texts = ("24GiB", "24G", "1.5 Gi", "16GB", "2097152", "24B")
    assert [*map(byte_count, texts)] == [24 * 2**30, 24 * 2**30, 3 * 2**29, 16 * 10**9, 2**21, 24]


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command `probe` whose `run` a test sets."""
    module = ModuleType("probe", "Probes.")
    module.add_arguments = lambda parser: parser.add_argument("--number", type=int)  # type: ignore[attr-defined]
    monkeypatch.setitem(COMMANDS, "probe", "probes")
    real = cli._import
    monkeypatch.setattr(cli, "_import", lambda name: module if name == "probe" else real(name))
    return module


def fail(error: BaseException) -> object:
    def run(options: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("n must be positive, got 0"), 2, "n must be positive, got 0"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 1, "'a.txt'"),
        (ModuleNotFoundError(name="tensorboard"), 1, 'pip install "dilated-attention[train]" brings it'),
        (ModuleNotFoundError(name="torch"), 1, "torch is not installed"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes\nmore"), 1, "out of memory: "),
    ],
)
def test_a_mistake_becomes_one_sentence(
    error: Exception, code: int, message: str, command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    command.run = fail(error)  # type: ignore[attr-defined]
    assert main(["probe"]) == code
    shown = capsys.readouterr().err
    assert shown.startswith("dilated-attention probe: error: ")
    assert message in shown
    assert shown.count("\n") == 1


def test_bugs_and_whoever_asks_keep_the_traceback(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.run = fail(RuntimeError("a bug"))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="a bug"):
        main(["probe"])
    command.run = fail(ValueError("n must be positive, got 0"))  # type: ignore[attr-defined]
    monkeypatch.setenv("DILATED_ATTENTION_TRACEBACK", "1")
    with pytest.raises(ValueError, match="n must be positive"):
        main(["probe"])


def test_options_reach_the_command_and_its_code_comes_back(command: ModuleType) -> None:
    command.run = lambda options: options.number  # type: ignore[attr-defined]
    assert main(["probe", "--number", "7"]) == 7
    command.run = fail(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert main(["probe"]) == 130


def test_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m dilated_attention_pytorch bench --list | head -1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_the_program_and_the_extras_are_declared() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dilated-attention = "dilated_attention_pytorch.cli.main:run_program"' in project
    for package, extra in EXTRAS.items():
        assert f'\n{extra} = ["{package}>=' in project


def test_the_page_has_a_section_for_every_command() -> None:
    page = (ROOT / "docs" / "command_line.md").read_text()
    for name in COMMANDS:
        assert re.search(rf"^## .*\b{name}\b", page, re.MULTILINE), name
        assert f"dilated-attention {name} " in page
