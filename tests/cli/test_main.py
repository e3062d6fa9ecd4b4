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
from dilated_attention_pytorch.cli.main import COMMANDS, EXTRAS, Command, main

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


def test_help_lists_every_command_without_torch() -> None:
    result = run_program("--help", code=WITHOUT_TORCH)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert all(
        f"  {name} " in result.stdout and command.help in result.stdout for name, command in COMMANDS.items()
    )


def test_version_is_the_package_s_without_torch() -> None:
    result = run_program("--version", code=WITHOUT_TORCH)
    assert (result.returncode, result.stdout) == (0, f"dilated-attention {__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_without_torch(name: str) -> None:
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
    ("arguments", "message"),
    [
        (["shwo"], "there is no command 'shwo'. Did you mean show? There are demo, doctor"),
        (["--verbose"], "--verbose is no option, and a command is missing"),
        (
            ["--json", "doctor"],
            "--json is no option of dilated-attention; options of a command come after it",
        ),
        (["doctor", "--jsno"], "dilated-attention doctor: error: unrecognized arguments: --jsno"),
    ],
)
def test_usage_errors_say_what_is_wrong_without_torch(arguments: list[str], message: str) -> None:
    result = run_program(*arguments, code=WITHOUT_TORCH)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command `probe` whose `run` a test sets."""
    module = ModuleType("probe", "Probes.")
    module.add_arguments = lambda parser: parser.add_argument("--number", type=int)  # type: ignore[attr-defined]
    monkeypatch.setitem(COMMANDS, "probe", Command("probes", "probe"))
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


def test_a_traceback_can_be_asked_for(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    command.run = fail(ValueError("n must be positive, got 0"))  # type: ignore[attr-defined]
    monkeypatch.setenv("DILATED_ATTENTION_TRACEBACK", "1")
    with pytest.raises(ValueError, match="n must be positive"):
        main(["probe"])


def test_a_bug_keeps_its_traceback(command: ModuleType) -> None:
    command.run = fail(RuntimeError("a bug"))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="a bug"):
        main(["probe"])


def test_interrupt_has_its_own_code(command: ModuleType) -> None:
    command.run = fail(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert main(["probe"]) == 130


def test_options_reach_the_command_and_its_code_comes_back(command: ModuleType) -> None:
    command.run = lambda options: options.number  # type: ignore[attr-defined]
    assert main(["probe", "--number", "7"]) == 7


def test_bench_gets_its_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    assert "quick" in capsys.readouterr().out


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
