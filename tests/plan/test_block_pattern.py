"""Block patterns as data: validated, measured, saved and drawn."""

from __future__ import annotations

import io
import json
import pickle
import struct
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import BlockPattern, block_sparse_attention, build_block_pattern
from support.pictures import find_maps, has_ink, read_png


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_pattern(n: int = 75, size: int = 8, layouts: int = 2, *, is_causal: bool = False) -> BlockPattern:
    blocks = -(-n // size)
    layout = torch.rand(layouts, blocks, blocks) < 0.4
    return BlockPattern.from_layout(layout, n, size, is_causal=is_causal)


def random_tiles(pattern: BlockPattern) -> BlockPattern:
    tiles = torch.rand(3, pattern.block_size, pattern.block_size) < 0.5
    tile_of = torch.randint(-1, 3, pattern.columns.shape, dtype=torch.int32)
    return BlockPattern(pattern.n, pattern.block_size, pattern.starts, pattern.columns, False, tiles, tile_of)


EYE = torch.eye(3, dtype=torch.bool)
GOOD: dict[str, Any] = {
    "n": 10,
    "block_size": 4,
    "starts": torch.tensor([0, 1, 2, 3]),
    "columns": ints(0, 1, 2),
    "is_causal": False,
}
WRAPPING = [0, 2**63 - 1, -2, 3]  # their differences, 2**63 - 1, 2**63 - 1 and 5, are positive in 64 bits
SIZES = [
    ({"n": 0}, ValueError, "n must be a positive integer, got 0"),
    ({"block_size": 4.0}, ValueError, "block_size must be a positive integer, got 4.0"),
    ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
]
TABLES = [
    ({"starts": [0, 1, 2, 3]}, TypeError, "starts must be a 1-d torch.int64 tensor on the cpu, got"),
    ({"starts": ints(0, 1, 2, 3)}, TypeError, "starts must be a 1-d torch.int64 .* got torch.int32"),
    ({"starts": torch.zeros(1, 4, dtype=torch.int64)}, TypeError, r"starts must be a 1-d .*\(1, 4\)"),
    ({"columns": torch.tensor([0, 1, 2])}, TypeError, "columns must be a 1-d torch.int32 .* torch.int64"),
    ({"columns": ints(0, 1, 2).to("meta")}, TypeError, "columns must be .* on the cpu, got .* on meta"),
    ({"starts": torch.tensor([0, 3])}, ValueError, "rows in multiples of 3, got 2"),
    ({"starts": torch.tensor([0, 1, 2, 3, 3])}, ValueError, "rows in multiples of 3, got 5"),
    ({"starts": torch.tensor([], dtype=torch.int64)}, ValueError, "rows in multiples of 3, got 0"),
    ({"starts": torch.tensor([1, 1, 2, 3])}, ValueError, "starts must rise from 0 to .* 3"),
    ({"starts": torch.tensor([0, 1, 2, 2])}, ValueError, "starts must rise from 0 to .* 3"),
    ({"starts": torch.tensor([0, 2, 1, 3])}, ValueError, "starts must rise from 0 to .* 3"),
    ({"starts": torch.tensor(WRAPPING)}, ValueError, "starts must rise from 0 to .* 3"),
    ({"columns": ints(0, 1, 3)}, ValueError, "columns must lie in 0 to 2, got 0 to 3"),
    ({"columns": ints(-1, 1, 2)}, ValueError, "columns must lie in 0 to 2, got -1 to 2"),
    ({"starts": torch.tensor([0, 2, 3, 3]), "columns": ints(1, 0, 2)}, ValueError, "of each row must rise"),
    ({"starts": torch.tensor([0, 2, 3, 3]), "columns": ints(1, 1, 2)}, ValueError, "of each row must rise"),
    ({"columns": ints(1, 1, 2), "is_causal": True}, ValueError, "keeps no block above the diagonal"),
]
ONES = torch.ones(2, 4, 4, dtype=torch.bool)
TABLES += [
    ({"tiles": ONES}, TypeError, "tile_of must be a 1-d torch.int32 tensor on the cpu, got None"),
    ({"tile_of": ints(0, 0, 0)}, TypeError, "tiles must be a 3-d torch.bool tensor on the cpu, got None"),
    ({"tiles": ONES.int(), "tile_of": ints(0, 0, 0)}, TypeError, "tiles must be a 3-d torch.bool .*int32"),
    ({"tiles": ONES[:, :3], "tile_of": ints(0, 0, 0)}, ValueError, r"\(tiles, 4, 4\) .* got \(2, 3, 4\)"),
    ({"tiles": ONES, "tile_of": ints(0, 0)}, ValueError, "one entry for each of 3 blocks, got .* and 2"),
    ({"tiles": ONES, "tile_of": ints(0, 2, -1)}, ValueError, "tile_of must lie in -1 to 1, got -1 to 2"),
    ({"tiles": ONES, "tile_of": ints(0, -2, 1)}, ValueError, "tile_of must lie in -1 to 1, got -2 to 1"),
    (
        {"tiles": ONES, "tile_of": ints(-1, 0, -1), "is_causal": True},
        ValueError,
        "a causal pattern shows nothing above the diagonal, got a tile that does",
    ),
]
LAYOUTS = [
    ({"layout": EYE.float()}, TypeError, "a layout must be a bool tensor, got torch.float32"),
    ({"layout": None}, TypeError, "a layout must be a bool tensor, got NoneType"),
    ({"layout": EYE[:2]}, ValueError, r"10 tokens in blocks of 4 must have .* \(3, 3\), .* got \(2, 3\)"),
    ({"layout": EYE[0]}, ValueError, r"must have the shape \(3, 3\), .* got \(3,\)"),
    ({"layout": EYE.expand(0, 3, 3)}, ValueError, r"must have the shape \(3, 3\), .* got \(0, 3, 3\)"),
    ({"layout": EYE.expand(2, 2, 3, 3)}, ValueError, r"must have the shape .* got \(2, 2, 3, 3\)"),
]


@pytest.mark.parametrize(("changes", "error", "message"), SIZES + TABLES)
def test_the_constructor_states_rule_and_fact(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    falling = BlockPattern(**GOOD | {"columns": ints(2, 1, 0)})  # from row to row
    assert torch.equal(falling.to_layout()[0], EYE.flip(0))
    with pytest.raises(error, match=message):
        BlockPattern(**GOOD | changes)


@pytest.mark.parametrize(("changes", "error", "message"), SIZES + LAYOUTS)
def test_a_layout_states_rule_and_fact(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BlockPattern.from_layout(**{"layout": EYE, "n": 10, "block_size": 4} | changes)


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    pattern, layout = random_pattern(), torch.eye(10, dtype=torch.bool)
    pattern.save(tmp_path / "pattern")
    causal, dense, pairs, text = pattern.causal(), pattern.to_dense(), pattern.num_pairs, str(pattern)
    with torch.device("meta"):
        loaded = BlockPattern.load(tmp_path / "pattern")
        loaded.draw(tmp_path / "pattern.png")
        assert (loaded.key, loaded.causal().key) == (pattern.key, causal.key)
        assert (loaded.num_pairs, str(loaded)) == (pairs, text)
        assert torch.equal(loaded.to_dense(), dense)
        assert BlockPattern.from_layout(layout, 75, 8).density == 0.1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "size"), [(1, 1), (1, 5), (75, 8), (80, 8), (13, 1)])
def test_a_layout_round_trips_and_numbers_are_those_of_the_dense_mask(
    n: int, size: int, causal: bool
) -> None:
    rows = -(-n // size)
    layout = torch.rand(3, rows, rows) < 0.5
    pattern = BlockPattern.from_layout(layout, n, size, is_causal=causal)
    kept, block = layout.tril() if causal else layout, torch.arange(n) // size
    dense = kept[:, block][:, :, block]
    dense = dense.tril() if causal else dense
    assert (len(pattern), pattern.is_causal) == (3, causal)
    assert torch.equal(pattern.to_layout(), kept)
    assert torch.equal(pattern.counts, kept.sum(-1).flatten())
    assert torch.equal(pattern.to_dense(), dense)
    assert pattern.num_pairs == int(dense.sum())
    total = rows * (rows + 1) / 2 if causal else rows * rows
    assert pattern.density == pytest.approx(int(kept.sum()) / (3 * total))
    assert pattern.nbytes == 8 * (3 * rows + 1) + 4 * int(kept.sum())
    assert torch.equal(pattern.causal().to_layout(), kept.tril())
    assert pattern.causal().is_causal
    assert (pattern.causal() is pattern) == causal
    single = BlockPattern.from_layout(layout[0], n, size, is_causal=causal)
    assert torch.equal(single.to_layout(), kept[:1])


def test_the_key_is_that_of_the_content() -> None:
    layout = torch.rand(4, 4) < 0.5
    layout[0, 0], layout[1, 2] = True, False
    moved = layout.clone()
    moved[0, 0], moved[1, 2] = False, True
    patterns = [
        BlockPattern.from_layout(layout, 16, 4),
        BlockPattern.from_layout(layout, 15, 4),
        BlockPattern.from_layout(layout, 20, 5),
        BlockPattern.from_layout(layout, 16, 4, is_causal=True),
        BlockPattern.from_layout(layout.tril(), 16, 4),
        BlockPattern.from_layout(moved, 16, 4),
        BlockPattern.from_layout(layout.expand(2, 4, 4), 16, 4),
    ]
    assert len({pattern.key for pattern in patterns}) == len(patterns)
    assert patterns[0].key == BlockPattern.from_layout(layout.clone(), 16, 4).key


def test_text_shows_the_blocks() -> None:
    pattern = BlockPattern.from_layout(torch.eye(4, dtype=torch.bool), 15, 4)
    assert repr(pattern) == ("BlockPattern(n=15, block_size=4, layouts=1, density=0.2500, is_causal=False)")
    lines = str(pattern).splitlines()
    assert lines == [repr(pattern), "██      ", "  ██    ", "    ██  ", "      ██"]
    large = build_block_pattern({"sparsity_ratio": 0.1, "block_size": 2}, 2000, 1)
    shown = str(large).splitlines()[1:]
    assert [len(line) for line in shown] == [64] * 32
    assert all(line[2 * i] != " " for i, line in enumerate(shown))


def test_draw_paints_every_block_and_shades_cells_of_many(tmp_path: Path) -> None:
    pattern = random_pattern(75, 8)
    for layout in range(2):
        pattern.draw(tmp_path / "p.png", layout=layout, pixels=45)  # 4 pixels for each of 10 blocks
        (image,) = find_maps(read_png(tmp_path / "p.png"), 40)
        dark = (image == torch.tensor([24, 52, 110])).all(-1)
        white = (image == 255).all(-1)
        expected = pattern.to_layout()[layout].repeat_interleave(4, 0).repeat_interleave(4, 1)
        assert torch.equal(dark, expected)
        assert torch.equal(white, ~expected)
    kept = torch.zeros(64, 64, dtype=torch.bool)
    kept[:32, :32] = kept[40, 50] = True
    BlockPattern.from_layout(kept, 64, 1).draw(str(tmp_path / "p.png"), pixels=2)
    (image,) = find_maps(read_png(tmp_path / "p.png"), 2)
    assert image[0, 0].tolist() == [24, 52, 110]
    assert image[0, 1].tolist() == image[1, 0].tolist() == [255] * 3
    assert image[1, 1].tolist() != [255] * 3  # one block of a thousand is still seen


def test_draw_says_what_it_shows(tmp_path: Path) -> None:
    pattern = random_pattern(64, 8, is_causal=True)
    pattern.draw(tmp_path / "p.svg", layout=1, pixels=160)
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    texts = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    said = " ".join(texts)
    assert "64 positions, blocks of 8" in said
    assert f"{pattern.density:.1%} kept, layout 1 (of 2), causal" in said
    assert {"query position", "key position", "0", "32", "64"} <= set(texts)
    assert texts[-3:] == ["kept block", "not kept", "future, never seen"]
    pattern.draw(tmp_path / "p.png", pixels=160)
    image = read_png(tmp_path / "p.png")
    (painted,) = find_maps(image, 160)
    future = torch.ones(8, 8).triu(1).bool().repeat_interleave(20, 0).repeat_interleave(20, 1)
    assert torch.equal((painted == torch.tensor([236, 236, 240])).all(-1), future)
    height, width, _ = image.shape
    for part in (image[:40], image[height - 40 :], image[:, :30], image[height - 120 : height - 60]):
        assert has_ink(part)  # title, legend, and both axes
    assert width > 160 < height


def test_draw_states_rule_and_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {"layout": (2, -1), "pixels": (0, 2.5, True)}
    for name, value in ((name, value) for name, values in rules.items() for value in values):
        with pytest.raises(ValueError, match=f"{name} must .* got {value}"):
            random_pattern().draw(tmp_path / "p.png", **{name: value})  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for path in ("p.png", "p.svg"):
        with pytest.raises(
            ModuleNotFoundError, match=r"matplotlib: pip install 'dilated-attention\[charts\]'"
        ):
            random_pattern().draw(tmp_path / path)


@pytest.mark.parametrize("causal", [False, True])
def test_save_and_load(causal: bool, tmp_path: Path) -> None:
    empty = BlockPattern.from_layout(torch.zeros(3, 3, dtype=torch.bool), 10, 4, is_causal=causal)
    tiled = random_tiles(random_pattern())
    tiled = tiled.causal() if causal else tiled
    plain = random_pattern(is_causal=causal), random_pattern(1, 1, is_causal=causal), empty
    for pattern in (*plain, tiled):
        pattern.save(tmp_path / "pattern")
        loaded = BlockPattern.load(str(tmp_path / "pattern"))
        assert loaded.key == pattern.key
        assert torch.equal(loaded.starts, pattern.starts)
        assert torch.equal(loaded.columns, pattern.columns)
        assert torch.equal(loaded.to_dense(), pattern.to_dense())
        assert pickle.loads(pickle.dumps(pattern)).key == pattern.key
        assert (loaded.n, loaded.block_size, loaded.is_causal) == (pattern.n, pattern.block_size, causal)
        q = torch.randn(1, pattern.n, 2, 4)
        options = {"is_causal": causal}
        expected = block_sparse_attention(q, q, q, pattern, **options)
        assert torch.equal(block_sparse_attention(q, q, q, loaded, **options), expected)


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/block_pattern_bomb"),))


def header(**changes: Any) -> bytes:
    fields = {"format": "dilated_attention_pytorch block pattern 1", "n": 10, "block_size": 4}
    fields |= {"is_causal": False, "rows": 3, "blocks": 3} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode() + b"\n"


def torch_file() -> bytes:
    file = io.BytesIO()
    torch.save({"columns": torch.ones(3)}, file)
    return file.getvalue()


BODY = struct.pack("<4q", 0, 1, 2, 3) + struct.pack("<3i", 0, 1, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a block pattern"),
        (b"\n", "is not a block pattern"),
        (b"\x80\xff\xfe" * 100, "is not a block pattern"),
        (BODY, "is not a block pattern"),
        (b"[1, 2]\n", "is not a block pattern"),
        (b"null\n", "is not a block pattern"),
        (b"3\n" + BODY, "is not a block pattern"),
        (b"[" * 4000 + b"\n", "is not a block pattern"),
        (b"{" + b" " * 10_000 + header()[1:] + BODY, "is not a block pattern"),
        (header(n=None) + BODY, "is not a block pattern"),
        (header(rows=None) + BODY, "is not a block pattern"),
        (header(format="another 1") + BODY, "has the format 'another 1', and this version reads"),
        (header(format=[]) + BODY, r"has the format \[\]"),
        (header(is_causal=1) + BODY, "its header holds"),
        (header(n=10.0) + BODY, "its header holds"),
        (header(n="10") + BODY, "its header holds"),
        (header(n=True) + BODY, "its header holds"),
        (header(blocks=-3) + BODY, "its header holds"),
        (header(n=0) + BODY, "n must be a positive integer, got 0"),
        (header(block_size=0) + BODY, "block_size must be a positive integer, got 0"),
        (header(n=10**30) + BODY, r"n must be below 2\*\*62"),
        (header(n=10**15) + BODY, "starts must have one entry a row"),
        (header(rows=10**18) + BODY, f"{8 * (10**18 + 1) + 12} bytes announced, 44 found"),
        (header(blocks=2**62) + BODY, "cut off or damaged"),
        (header() + BODY[:-1], "44 bytes announced, 43 found"),
        (header() + BODY + b"x", "44 bytes announced, 45 found"),
        (header(), "44 bytes announced, 0 found"),
        (header(n=20) + BODY, "rows in multiples of 5, got 4"),
        (header() + struct.pack("<4q", 0, 1, 2, 2) + BODY[32:], "starts must rise from 0"),
        (header() + struct.pack("<4q", 0, -(2**63), 2, 3) + BODY[32:], "starts must rise from 0"),
        (header() + struct.pack("<4q", 0, 2**62, 2, 3) + BODY[32:], "starts must rise from 0"),
        (header() + struct.pack("<4q", *WRAPPING) + BODY[32:], "starts must rise from 0"),
        (header() + BODY[:32] + struct.pack("<3i", 0, 1, 7), "columns must lie in 0 to 2, got 0 to 7"),
        (header(is_causal=True) + BODY[:32] + struct.pack("<3i", 1, 1, 2), "above the diagonal"),
        (pickle.dumps(Bomb()), "is not a block pattern"),
        (pickle.dumps({"format": 1}) + header() + BODY, "is not a block pattern"),
        (torch_file(), "is not a block pattern"),
    ],
    ids=range(37),
)
def test_damaged_and_hostile_files(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "pattern"
    path.write_bytes(header() + BODY)
    assert torch.equal(BlockPattern.load(path).to_layout()[0], EYE)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        BlockPattern.load(path)
    assert not Path("/tmp/block_pattern_bomb").exists()


def test_every_cut_of_a_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "pattern"
    random_tiles(random_pattern(20, 4, 1)).save(path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"is not a block pattern|cut off or damaged"):
            BlockPattern.load(path)


def test_a_pattern_that_was_written_to_is_refused() -> None:
    pattern = BlockPattern.from_layout(torch.eye(8) > 0, 64, 8)
    x = torch.randn(1, 64, 1, 4)
    block_sparse_attention(x, x, x, pattern)
    tiled = random_tiles(BlockPattern.from_layout(torch.eye(8) > 0, 64, 8))
    assert tiled.tiles is not None
    tiled.tiles.fill_(True)
    pattern.columns.copy_(pattern.columns.flip(0))
    for changed in (pattern, tiled):
        with pytest.raises(ValueError, match="must stay as they are, and were written to: make another"):
            block_sparse_attention(x, x, x, changed)
