"""Blocks that `autotune` stored: used where they hold, ignored with a reason where they do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import DilatedSpec
from dilated_attention_pytorch.core.workspace import Workspace
from dilated_attention_pytorch.kernels import Inputs, triton
from dilated_attention_pytorch.kernels.triton import tuned, tuning
from dilated_attention_pytorch.kernels.triton.tuning import Blocks
from dilated_attention_pytorch.plan import UNBOUNDED, Shape, plan_dilated

GPU = torch.device("cuda", 0)
NAME = "some GPU"
BEST = Blocks(32, 128, 2, 3)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that holds one result for a GPU of some name."""
    path = tmp_path / "tuning.json"
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    monkeypatch.setattr(tuned, "device_name", lambda _: NAME)
    monkeypatch.setattr(tuned, "made_with", lambda: {"triton": "3.0", "kernels": "abc"})
    result = tuned.Result("attend", "bfloat16", 80, BEST, 1.0, 2.0)
    entry = {"made_with": tuned.made_with(), "results": [result._asdict()]}
    path.write_text(json.dumps({"format": tuned.FORMAT, "devices": {NAME: entry}}))
    tuned._stored.cache_clear()
    yield path
    tuned._stored.cache_clear()


def choose(which: tuning.Pass, dtype: torch.dtype, d: int) -> tuned.Choice:
    return tuned.choose_blocks(GPU, "sm_80", which, dtype, d)


@pytest.mark.usefixtures("file")
def test_results_hold_for_heads_of_the_same_parts_and_for_nothing_else() -> None:
    assert choose("attend", torch.bfloat16, 80) == (BEST, True)
    assert choose("attend", torch.bfloat16, 72) == (BEST, True)
    others: Any = ("attend", torch.bfloat16, 64), ("attend", torch.float16, 80)
    for which, dtype, d in (*others, ("query_gradients", torch.bfloat16, 80)):
        assert choose(which, dtype, d) == (tuning.blocks_for("sm_80", which, 2, d), False)


@pytest.mark.usefixtures("file")
def test_launches_use_what_is_stored() -> None:
    spec, shape = DilatedSpec((512,), (1,)), Shape(1, 512, 1, 1, 80)
    plan = plan_dilated(spec, shape, itemsize=2, workspace_bytes=UNBOUNDED)
    q, k, v = (torch.empty(1, 512, 1, 80, dtype=torch.bfloat16) for _ in range(3))
    call = triton.Call(plan, Inputs(q, k, v, None, 1.0, 0.0, 0, Workspace()))
    assert call._blocks("attend") == BEST
    assert call._blocks("query_gradients") == tuning.blocks_for("interpreter", "query_gradients", 2, 80)


def result(**fields: Any) -> Any:
    """A document in which fields of the result are others."""
    return lambda document: document["devices"][NAME]["results"][0].update(fields) or document


def made(**versions: str) -> Any:
    return lambda document: document["devices"][NAME]["made_with"].update(versions) or document


WRONG, INCOMPLETE = "a result must hold a pass, a dtype, a head size and blocks, got", "are incomplete"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (made(triton="2.1.0"), r"the results for some GPU are of .*2\.1\.0.*, and this is"),
        (made(kernels="0"), "the results for some GPU are of"),
        *(
            (result(blocks=blocks), WRONG)
            for blocks in ([48, 64, 4, 2], [512, 64, 4, 2], [64, 64, 3, 2], [64, 64, 4, 0], [64, 64, True, 2])
        ),
        *((result(**fields), WRONG) for fields in ({"which": ["attend"]}, {"dtype": {}}, {"d": "64"})),
        *((result(**fields), INCOMPLETE) for fields in ({"blocks": [64, 64, 4]}, {"blocks": 0}, {"more": 1})),
        (lambda _: {"format": 0, "devices": {}}, "it must hold devices in format 1, got format 0"),
        (lambda _: {"format": 1, "devices": []}, "it must hold devices"),
        (lambda _: {"format": 1, "devices": {NAME: 3}}, "the results for some GPU are incomplete"),
        (lambda _: [], "it must hold devices in format 1, got format None"),
        (lambda _: b"not JSON", "Expecting value"),
        (lambda _: b"\xff\xfe", "can't decode"),
        (lambda _: b"[" * 100_000, "JSON must not nest deeper"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(file: Path, change: Any, reason: str) -> None:
    changed = change(json.loads(file.read_text()))
    file.write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode())
    shipped = tuning.blocks_for("sm_80", "attend", 2, 80)
    with pytest.warns(UserWarning, match=reason) as caught:
        assert choose("attend", torch.bfloat16, 80) == (shipped, False)
    assert len(caught) == 1
    assert str(file) in str(caught[0].message)
    assert "`dilated-attention autotune` writes it anew" in str(caught[0].message)
    assert choose("attend", torch.bfloat16, 80) == (shipped, False)  # a second warning would be an error


def test_no_file_and_other_devices_are_no_reason_for_a_warning(file: Path) -> None:
    document = json.loads(file.read_text())
    document["devices"]["another GPU"] = {"made_with": {}, "results": "damaged"}
    file.write_text(json.dumps(document))
    assert choose("attend", torch.bfloat16, 80).is_tuned
    file.unlink()
    tuned._stored.cache_clear()
    assert not choose("attend", torch.bfloat16, 80).is_tuned


def test_where_results_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    ending = Path("dilated_attention_pytorch", "tuning.json")
    assert tuned.tuning_file(NAME) == tmp_path / ".cache" / ending
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # which its specification says to ignore
    assert tuned.tuning_file(NAME) == tmp_path / ".cache" / ending
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert tuned.tuning_file(NAME) == tmp_path / "x" / ending
    assert tuned.tuning_file("interpreter") is None  # rehearsals are not stored where nobody asked for it
    monkeypatch.setenv(tuned.VARIABLE, "here.json")
    assert tuned.tuning_file("interpreter") == tuned.tuning_file(NAME) == Path("here.json")


def test_candidates_are_the_row_and_neighbours_that_fit() -> None:
    for (_, which, itemsize), row in tuning.TABLE.items():
        for d, blocks in row.items():
            found = tuning.candidates(blocks, which, itemsize, d, 96 * 1024)
            assert found[0] == blocks
            assert 4 <= len(found) == len(set(found)) <= 19
            for near in found[1:]:
                tuned.check_result(tuned.Result(which, "float16", d, near, 1.0, 1.0))
            assert [blocks] == tuning.candidates(blocks, which, itemsize, d, 0)
