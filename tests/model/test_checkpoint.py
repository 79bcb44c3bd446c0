"""Safetensors files: what is read of them, and how a broken one is told."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from moe_ep.model.checkpoint import INDEX_FILE, Checkpoint, LoadError
from tests.compare import assert_bits_equal
from tests.tiny import tiny_checkpoint


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A checkpoint of two files that a test may break."""
    return Path(shutil.copytree(tiny_checkpoint("v3", num_shards=2).path, tmp_path / "model"))


def test_rows_are_sliced_and_only_their_bytes_are_read():
    path = tiny_checkpoint("v3").path
    checkpoint = Checkpoint(path)
    name = "model.embed_tokens.weight"
    whole = checkpoint.read(name)
    checkpoint.bytes_read = 0
    assert_bits_equal(checkpoint.read(name, slice(3, 10)), whole[3:10])
    assert checkpoint.bytes_read == 7 * whole.shape[1] * 4
    assert checkpoint.read(name, slice(10, 3)).shape == (0, whole.shape[1])
    assert_bits_equal(checkpoint.read(name, slice(-2, None)), whole[-2:])
    with pytest.raises(ValueError, match="step"):
        checkpoint.read(name, slice(0, 4, 2))


def damage_index(path: Path, change: Any) -> None:
    index = json.loads((path / INDEX_FILE).read_text())
    change(index["weight_map"])
    (path / INDEX_FILE).write_text(json.dumps(index))


def test_a_missing_shard_and_a_cut_off_one_are_both_named(broken: Path):
    first, second = sorted(broken.glob("*.safetensors"))
    first.unlink()
    with second.open("r+b") as stream:
        stream.truncate(second.stat().st_size - 1)
    with pytest.raises(LoadError) as caught:
        Checkpoint(broken)
    missing, cut = caught.value.problems
    assert missing == f"file {first.name} is missing"
    assert second.name in cut
    assert "cut off" in cut


@pytest.mark.parametrize("content", [b"", b"\x05", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        Checkpoint(tmp_path)


def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path):
    header = {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(LoadError, match=r"tensor a of shape \[3\] and dtype F32 is given 8 bytes"):
        Checkpoint(tmp_path)


def test_index_errors(broken: Path):
    damage_index(
        broken, lambda index: index.update({"model.extra": "model-00001-of-00002.safetensors"})
    )
    with pytest.raises(LoadError, match=r"promises model\.extra"):
        Checkpoint(broken)
    damage_index(broken, lambda index: index.update({"model.extra": "absent.safetensors"}))
    with pytest.raises(LoadError, match=r"absent\.safetensors is missing"):
        Checkpoint(broken)
    (broken / INDEX_FILE).write_text("{}")
    with pytest.raises(LoadError, match="weight_map"):
        Checkpoint(broken)
    (broken / INDEX_FILE).unlink()
    first = min(broken.glob("*.safetensors"))
    shutil.copy(first, broken / "copy.safetensors")
    with pytest.raises(LoadError) as caught:
        Checkpoint(broken)
    twice = {f"tensor {name} is in 2 files" for name in load_file(first)}
    assert set(caught.value.problems) == twice


def test_an_empty_directory_and_a_file_that_shrinks_later(tmp_path: Path, broken: Path):
    with pytest.raises(LoadError, match="no \\*\\.safetensors file"):
        Checkpoint(tmp_path)
    checkpoint = Checkpoint(broken)
    entry = checkpoint.entries["model.norm.weight"]
    with entry.file.open("r+b") as stream:
        stream.truncate(entry.start + 1)
    with pytest.raises(LoadError, match="ended later before"):
        checkpoint.read("model.norm.weight")
