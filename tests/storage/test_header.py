import json
import os
import struct

import pytest

from mbolt_mlx.core.errors import CheckpointError
from mbolt_mlx.storage.checkpoint import read_header
from tests.storage.made import raw_file, safetensors, tensor


def refused(path, *words):
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    text = str(caught.value)
    assert str(path) in text
    for word in words:
        assert word in text, text
    assert "\n" not in text
    return caught.value


def test_good_file_with_zero_length_tensor_and_scalar(tmp_path):
    path = safetensors(
        tmp_path / "a.safetensors",
        {"x": ("F32", [2, 3]), "none": ("F16", [0, 4]), "s": ("I64", [])},
    )
    tensors, metadata, start, sha = read_header(path)
    assert tensors["x"].shape == (2, 3) and tensors["x"].offset == start
    assert tensors["none"].nbytes == 0 and tensors["s"].nbytes == 8
    assert metadata == {"format": "mlx"} and len(sha) == 64


def test_file_with_metadata_and_no_tensors(tmp_path):
    path = raw_file(tmp_path / "a.safetensors", {"__metadata__": {"a": "b"}})
    assert read_header(path)[:2] == ({}, {"a": "b"})


def test_tensors_listed_in_another_order_than_their_bytes(tmp_path):
    header = {"b": tensor([1], 4, 8), "a": tensor([1], 0, 4)}
    path = raw_file(tmp_path / "a.safetensors", header, bytes(8))
    assert list(read_header(path)[0]) == ["a", "b"]


def test_length_field_beyond_the_file(tmp_path):
    path = raw_file(tmp_path / "a.safetensors", {}, length=5000)
    refused(path, "byte 0", "more than the file", "expected 5000")


@pytest.mark.parametrize("length", [100_000_001, 1 << 40, (1 << 64) - 1])
def test_length_field_beyond_100_mb(tmp_path, length):
    refused(raw_file(tmp_path / "a.safetensors", {}, length=length), "more than 100 MB", "byte 0")


@pytest.mark.parametrize("size", [1, 7])
def test_shorter_than_the_length_field(tmp_path, size):
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(size))
    refused(path, "too short")


def test_empty_file(tmp_path):
    path = tmp_path / "a.safetensors"
    path.touch()
    refused(path, "empty")


def test_git_lfs_pointer(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    refused(path, "Git-LFS pointer", "git lfs pull")


def test_not_utf8(tmp_path):
    refused(raw_file(tmp_path / "a.safetensors", b'{"\xff": 1}'), "not UTF-8")


@pytest.mark.parametrize("text", [b"{", b"", b"    ", b"{} {}", b"{'a': 1}", b"\x00" * 16])
def test_not_json(tmp_path, text):
    refused(raw_file(tmp_path / "a.safetensors", text), "not JSON")


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000])
def test_nested_too_deeply(tmp_path, text):
    refused(raw_file(tmp_path / "a.safetensors", text), "nested too deeply")


def test_number_of_a_million_digits(tmp_path):
    text = b'{"x": {"dtype": "F32", "shape": [' + b"9" * 1_000_000 + b'], "data_offsets": [0, 4]}}'
    refused(raw_file(tmp_path / "a.safetensors", text))


@pytest.mark.parametrize("text", [b"[]", b"3", b'"x"', b"null"])
def test_not_an_object(tmp_path, text):
    refused(raw_file(tmp_path / "a.safetensors", text), "not an object")


def test_tensor_named_twice(tmp_path):
    entry = json.dumps(tensor([1], 0, 4))
    path = raw_file(
        tmp_path / "a.safetensors", f'{{"x": {entry}, "x": {entry}}}'.encode(), bytes(4)
    )
    refused(path, "'x' twice")


def test_not_a_number_in_header(tmp_path):
    refused(raw_file(tmp_path / "a.safetensors", b'{"x": NaN}'), "NaN")


@pytest.mark.parametrize("metadata", [[], "a", 3])
def test_metadata_not_an_object(tmp_path, metadata):
    refused(raw_file(tmp_path / "a.safetensors", {"__metadata__": metadata}), "__metadata__")


@pytest.mark.parametrize("value", [1, None, {"a": "b"}])
def test_metadata_value_not_a_string(tmp_path, value):
    refused(raw_file(tmp_path / "a.safetensors", {"__metadata__": {"k": value}}), "'k'", "string")


@pytest.mark.parametrize("entry", [None, [], "F32", 5])
def test_entry_not_an_object(tmp_path, entry):
    refused(raw_file(tmp_path / "a.safetensors", {"x": entry}), "tensor x", "not an object")


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_entry_without_a_key(tmp_path, key):
    entry = tensor([1], 0, 4)
    del entry[key]
    refused(raw_file(tmp_path / "a.safetensors", {"x": entry}, bytes(4)), "tensor x", key)


@pytest.mark.parametrize("dtype", ["F33", "f32", "", None, 4, ["F32"]])
def test_unknown_dtype(tmp_path, dtype):
    entry = {**tensor([1], 0, 4), "dtype": dtype}
    refused(raw_file(tmp_path / "a.safetensors", {"x": entry}, bytes(4)), "tensor x", "dtype")


@pytest.mark.parametrize("shape", [[-1], [1.0], ["1"], [True], None, 4, {"a": 1}, [[1]]])
def test_shape_that_is_no_shape(tmp_path, shape):
    entry = {**tensor([1], 0, 4), "shape": shape}
    refused(raw_file(tmp_path / "a.safetensors", {"x": entry}, bytes(4)), "tensor x", "shape")


@pytest.mark.parametrize(
    "shape", [[1 << 62, 1 << 62], [1 << 32, 1 << 32], [(1 << 64) + 1], [1 << 63, 0], [1 << 61]]
)
def test_dimensions_that_overflow_64_bits(tmp_path, shape):
    path = raw_file(tmp_path / "a.safetensors", {"x": tensor(shape, 0, 4)}, bytes(4))
    refused(path, "tensor x", "more bytes than any file")


def test_dimensions_without_end(tmp_path):
    path = raw_file(tmp_path / "a.safetensors", {"x": tensor([1] * 200_000, 0, 4)}, bytes(4))
    refused(path, "tensor x", "too many dimensions")


@pytest.mark.parametrize("ends", [[0], [0, 4, 8], [0, 4.0], [-4, 0], None, "04", [False, 4]])
def test_range_that_is_no_range(tmp_path, ends):
    entry = {**tensor([1], 0, 4), "data_offsets": ends}
    refused(
        raw_file(tmp_path / "a.safetensors", {"x": entry}, bytes(4)), "tensor x", "data_offsets"
    )


def test_range_reversed(tmp_path):
    path = raw_file(tmp_path / "a.safetensors", {"x": tensor([1], 4, 0)}, bytes(4))
    refused(path, "tensor x", "ends before it begins", "byte ")


@pytest.mark.parametrize("end", [3, 5, 8])
def test_range_not_shape_times_dtype(tmp_path, end):
    path = raw_file(tmp_path / "a.safetensors", {"x": tensor([1], 0, end)}, bytes(end))
    refused(path, "tensor x", "shape [1] times F32", "expected 4 bytes", f"found {end}")


def test_half_a_byte(tmp_path):
    path = raw_file(tmp_path / "a.safetensors", {"x": tensor([3], 0, 1, "F4")}, bytes(1))
    refused(path, "tensor x", "whole number of bytes")


def test_ranges_overlap(tmp_path):
    header = {"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}
    refused(
        raw_file(tmp_path / "a.safetensors", header, bytes(12)), "tensor b", "overlaps that of a"
    )


def test_gap_between_ranges(tmp_path):
    header = {"a": tensor([1], 0, 4), "b": tensor([1], 8, 12)}
    refused(raw_file(tmp_path / "a.safetensors", header, bytes(12)), "tensor b", "gap", "4 bytes")


def test_gap_before_the_first_range(tmp_path):
    path = raw_file(tmp_path / "a.safetensors", {"a": tensor([1], 4, 8)}, bytes(8))
    refused(path, "tensor a", "gap")


def test_range_past_the_end(tmp_path):
    path = raw_file(tmp_path / "a.safetensors", {"a": tensor([4], 0, 16)}, bytes(15))
    refused(path, "tensor a", "cut short", "download")


def test_range_far_past_the_end(tmp_path):
    header = {"a": {"dtype": "U8", "shape": [1 << 50], "data_offsets": [0, 1 << 50]}}
    refused(raw_file(tmp_path / "a.safetensors", header, bytes(15)), "tensor a", "cut short")


def test_bytes_after_the_last_tensor(tmp_path):
    path = raw_file(tmp_path / "a.safetensors", {"a": tensor([1], 0, 4)}, bytes(5))
    refused(path, "bytes after the last tensor")


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[31m", "a\nb"])
def test_name_that_cannot_be_printed(tmp_path, name):
    path = raw_file(tmp_path / "a.safetensors", {name: tensor([1], 0, 4)}, bytes(4))
    str(refused(path, "cannot be written")).encode()


def test_folder_in_place_of_a_file(tmp_path):
    refused(tmp_path, "not a regular file")


def test_fifo_in_place_of_a_file_does_not_hang(tmp_path):
    path = tmp_path / "a.safetensors"
    os.mkfifo(path)
    refused(path, "not a regular file")


def test_link_to_nothing(tmp_path):
    path = tmp_path / "a.safetensors"
    path.symlink_to(tmp_path / "blobs" / "0123")
    refused(path, "cannot open", "a link to", "absent")


def test_link_to_a_blob_that_is_still_incomplete(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123.incomplete").touch()
    path = tmp_path / "a.safetensors"
    path.symlink_to(tmp_path / "blobs" / "0123")
    refused(path, "download was interrupted")


def test_local_download_that_is_still_incomplete(tmp_path):
    folder = tmp_path / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True)
    (folder / "a.safetensors.0123.incomplete").touch()
    refused(tmp_path / "a.safetensors", "download was interrupted")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path):
    path = safetensors(tmp_path / "a.safetensors", {"x": ("F32", [1])})
    path.chmod(0)
    refused(path, "cannot open")


def test_every_cut_of_a_good_file_is_refused(tmp_path):
    whole = safetensors(tmp_path / "a.safetensors", {"x": ("F32", [2]), "y": ("U8", [3])})
    raw = whole.read_bytes()
    for size in range(len(raw)):
        cut = tmp_path / "cut.safetensors"
        cut.write_bytes(raw[:size])
        refused(cut)


def test_every_flip_of_a_header_byte_is_refused_or_read_within_the_file(tmp_path):
    whole = safetensors(tmp_path / "a.safetensors", {"x": ("F32", [2]), "y": ("U8", [3])})
    raw = whole.read_bytes()
    length = 8 + struct.unpack("<Q", raw[:8])[0]
    flipped = tmp_path / "flip.safetensors"
    for at in range(length):
        for bit in (0x01, 0x80, 0x20):
            bad = bytearray(raw)
            bad[at] ^= bit
            flipped.write_bytes(bad)
            try:
                tensors = read_header(flipped)[0]
            except CheckpointError:
                continue
            assert all(t.offset + t.nbytes <= len(raw) for t in tensors.values())
