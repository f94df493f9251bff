"""Files of others: what is exported comes back to the last bit, and no damage goes unnoticed."""

import os
import resource
import struct
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from safetensors.torch import save_file

from elastix.errors import Corrupt, Full, NotFound, ReadOnly, StoreError
from elastix.state import Ref, State, raw_bytes
from elastix.store import exchange
from elastix.store.exchange import export, read


def bits(pattern: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack("<I", pattern)), dtype=torch.float32)


TENSORS = {
    "float32": torch.randn(3, 4),
    "float64": torch.randn(2, dtype=torch.float64),
    "bfloat16": torch.randn(5).bfloat16(),
    "float16": torch.randn(5).half(),
    "bool": torch.tensor([True, False]),
    "complex64": torch.randn(2, 2, dtype=torch.complex64),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "0-d": torch.tensor(1.5),
    "empty": torch.empty(0, 3),
    "not contiguous": torch.randn(4, 6).t()[::2],
    "expanded": torch.randn(1, 3).expand(4, 3),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "NaN payload": bits(0x7FC12345),
    "negative NaN": bits(0xFFC00001),
    "negative zero": torch.tensor([-0.0]),
    "denormal": bits(1),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_survives_a_file_to_the_last_bit(tmp_path, tensor):
    state = State({"x": tensor}, {"step": 3}, (Ref("a" * 64),))
    export(state, tmp_path / "deep" / "state")
    found = read(tmp_path / "deep" / "state")
    assert found.tensors["x"].dtype == tensor.dtype
    assert found.tensors["x"].shape == tensor.shape
    assert torch.equal(raw_bytes(found.tensors["x"]), raw_bytes(tensor))
    assert (found.meta, found.parents) == (state.meta, state.parents)
    assert found.manifest().ref == state.manifest().ref


def test_tied_tensors_stand_in_a_file_once(tmp_path):
    big = torch.randn(1000)
    export(State({"a": big, "b": big}), tmp_path / "tied")
    export(State({"a": big, "b": big.clone()}), tmp_path / "apart")
    assert (tmp_path / "apart").stat().st_size - (tmp_path / "tied").stat().st_size > 3500
    assert torch.equal(read(tmp_path / "tied").tensors["b"], big)


def test_a_tensor_that_is_called_as_the_header_is_refused(tmp_path):
    """Written it would stand there twice, and the file be read by nobody."""
    before = State({"w": torch.ones(2)})
    export(before, tmp_path / "file")
    with pytest.raises(StoreError, match=r"'__metadata__'.* Nothing was written"):
        export(State({"__metadata__": torch.ones(2), "w": torch.ones(2)}), tmp_path / "file")
    assert read(tmp_path / "file").manifest().ref == before.manifest().ref


def test_every_flipped_byte_of_a_tensor_is_noticed_and_the_tensor_named(tmp_path):
    path = tmp_path / "state"
    export(State({"only": torch.randn(8)}), path)
    written = path.read_bytes()
    for place in range(len(written) - 32, len(written)):
        path.write_bytes(written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :])
        with pytest.raises(Corrupt, match="'only'"):
            read(path)


def test_no_damage_to_the_header_goes_unnoticed(tmp_path):
    path = tmp_path / "state"
    state = State({"only": torch.randn(8)}, {"step": 3})
    export(state, path)
    written = path.read_bytes()
    unnoticed = []
    for place in range(len(written) - 32):
        path.write_bytes(written[:place] + bytes([written[place] ^ 4]) + written[place + 1 :])
        try:
            if read(path).manifest() == state.manifest():
                continue
        except Corrupt:
            continue
        except Exception as error:  # noqa: BLE001 - whatever else it is, it is not Corrupt
            unnoticed.append((place, repr(error)))
        else:
            unnoticed.append((place, "other values"))
    assert not unnoticed, f"{len(unnoticed)} places, the first: {unnoticed[0]}"


@pytest.mark.parametrize("size", [0, 4, 200])
def test_a_file_that_was_cut_is_corrupt(tmp_path, size):
    path = tmp_path / "state"
    export(State({"only": torch.randn(100)}), path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(Corrupt, match="state"):
        read(path)


@pytest.mark.parametrize("header", [{"format": "2", "ref": ""}, {"manifest": ""}])
def test_a_file_of_another_format_is_refused(tmp_path, header):
    save_file({"x": torch.zeros(1)}, tmp_path / "state", metadata=header)
    with pytest.raises(Corrupt, match="format"):
        read(tmp_path / "state")


def test_there_may_be_no_file(tmp_path):
    with pytest.raises(NotFound, match="nowhere"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize("fails", ["fsync", "save_file", "replace"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, fails):
    path = tmp_path / "state"
    first = State({"x": torch.zeros(3)})
    export(first, path)

    def full(*_args, **_kwargs):
        raise OSError(28, "no space left")

    owner = {"fsync": os, "save_file": safetensors.torch, "replace": type(path)}[fails]
    monkeypatch.setattr(owner, fails, full)
    for target in (path, tmp_path / "new"):
        with pytest.raises(Full, match="no space left"):
            export(State({"x": torch.ones(3)}), target)
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    assert read(path).manifest() == first.manifest()


def test_a_disk_without_room_is_no_fault_of_the_state(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1 << 16, hard)
    )  # safetensors has an error of its own
    try:
        with pytest.raises(Full, match=r"(?i)file too large"):
            export(State({"x": torch.ones(1 << 16)}), tmp_path / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_opened_is_not_called_damaged(tmp_path, monkeypatch):
    path = tmp_path / "state"
    export(State({"x": torch.ones(3)}), path)

    def refused(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(exchange, "safe_open", refused)
    with pytest.raises(ReadOnly, match=r"reading .*state failed: Permission denied"):
        read(path)


def test_a_tensor_that_was_added_to_an_exported_file_is_named(tmp_path):
    path = tmp_path / "state"
    export(State({"x": torch.ones(3)}), path)
    with safetensors.safe_open(path, framework="pt") as file:
        header = file.metadata()
    save_file({"x": torch.ones(3), "y": torch.ones(3)}, path, metadata=header)
    with pytest.raises(Corrupt, match="'y'"):
        read(path)


@pytest.mark.parametrize("fails", ["fsync", "write_table"])
def test_a_catalogue_that_cannot_be_written_leaves_the_one_that_was_there(
    tmp_path, monkeypatch, fails
):
    path = tmp_path / "models.parquet"
    exchange.catalogue([], path)
    before = path.read_bytes()

    def full(table=None, where=None, **_options):
        if isinstance(where, Path):
            where.write_bytes(b"half of it")
        raise OSError(28, "no space left")

    monkeypatch.setattr({"fsync": os, "write_table": exchange.pq}[fails], fails, full)
    with pytest.raises(Full, match="no space left"):
        exchange.catalogue([], path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
