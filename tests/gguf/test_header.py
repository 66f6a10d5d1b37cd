"""GGUF headers: what is read, and an error for each way in which one can be broken."""

import os
import random
import struct

import gguf
import numpy as np
import pytest

from mbolt_gguf import types
from mbolt_gguf.header import parse_header, read_gguf
from mbolt_mlx.core.errors import GgufError
from tests.gguf.conftest import F16, F32, NUMBERS, Q8_0, encode, string, value

TENSORS = [("a.weight", F32, (8, 3)), ("b.weight", Q8_0, (64, 2)), ("c", F16, (5,))]
VALUES = [value("general.architecture", "str", "x"), value("x.n", "u32", 7)]


def refused(path, *says):
    with pytest.raises(GgufError) as error:
        read_gguf(path)
    text = str(error.value)
    assert text.startswith(str(path)) and "\n" not in text
    for part in says:
        assert part in text, text
    return text


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_is_read(write, version):
    path = write(VALUES, TENSORS, version=version)
    found = read_gguf(path, file=3)
    assert (found.version, found.alignment, found.size) == (version, 32, path.stat().st_size)
    assert {key: v.get() for key, v in found.values.items()} == {
        "general.architecture": "x",
        "x.n": 7,
    }
    assert [(t.name, t.type, t.shape, t.nbytes, t.file) for t in found.tensors] == [
        ("a.weight", F32, (8, 3), 96, 3),
        ("b.weight", Q8_0, (64, 2), 136, 3),
        ("c", F16, (5,), 10, 3),
    ]
    starts = [t.offset - found.data_start for t in found.tensors]
    assert starts == [0, 96, 96 + 160]
    assert found.raw_header == path.read_bytes()[: found.data_start]


def test_a_file_of_another_writer_is_read_as_its_reader_does(tmp_path):
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_token_list([f"t{i}" for i in range(300)])
    writer.add_array("test.floats", [0.5, -1.0])
    writer.add_tensor("x", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    q8 = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("y", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for t in theirs.tensors:
        (own,) = (o for o in ours.tensors if o.name == t.name)
        assert (own.offset, own.nbytes) == (t.data_offset, t.n_bytes)
        assert own.shape == tuple(t.shape.tolist()) and own.type == t.tensor_type
    assert ours.values["tokenizer.ggml.tokens"].get() == [f"t{i}" for i in range(300)]
    assert ours.values["test.floats"].get() == [0.5, -1.0]


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_keep_their_bytes_and_are_decoded(write, kind):
    what = True if kind == "bool" else 0.5 if kind[0] == "f" else 100
    encoded = [value("one", kind, what), value("many", f"{kind}[]", [what] * 3)]
    found = read_gguf(write(encoded)).values
    assert [v.encoded for v in found.values()] == encoded
    assert found["one"].get() == what and found["many"].get() == [what] * 3
    assert type(found["one"].get()) is type(what)


def test_empty_arrays_strings_and_arrays_of_bytes(write):
    encoded = [
        value("none", "u32[]", []),
        value("no.strings", "str[]", []),
        value("empty", "str", ""),
        value("bytes", "u8[]", bytes(range(256))),
        value("not.utf8", "str", b"\xff\xfe"),
        value("strings", "str[]", ["", "a", "é"]),
    ]
    found = read_gguf(write(encoded)).values
    assert [v.encoded for v in found.values()] == encoded
    assert found["none"].get() == [] and found["no.strings"].get() == []
    assert found["empty"].get() == "" and found["bytes"].get() == list(range(256))
    assert found["not.utf8"].get().encode(errors="surrogateescape") == b"\xff\xfe"
    assert found["strings"].get() == ["", "a", "é"]


def test_a_header_of_several_megabytes(write):
    words = [f"word {i}" for i in range(200_000)]
    path = write([value("tokens", "str[]", words), *VALUES], TENSORS)
    found = read_gguf(path)
    assert found.values["tokens"].get() == words and found.data_start > 1 << 20


def test_every_shorter_file_is_refused(tmp_path):
    whole = encode([*VALUES, value("x.words", "str[]", ["a", "bc"])], TENSORS, last_padding=False)
    path = tmp_path / "short.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refused(path)
    path.write_bytes(whole)
    read_gguf(path)


def test_a_damaged_header_is_read_or_refused_but_never_more(tmp_path):
    whole = bytearray(encode([*VALUES, value("x.words", "str[]", ["a", "bc"])], TENSORS))
    rng = random.Random(0)
    path = tmp_path / "damaged.gguf"
    outcomes = set()
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(300)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            found = read_gguf(path)
            assert all(t.offset + t.nbytes <= found.size for t in found.tensors)
            [v.get() for v in found.values.values()]
            outcomes.add("read")
        except GgufError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize("size", range(32))
def test_a_header_that_ends_anywhere_up_to_the_alignment(write, size):
    pad = value("pad", "str", "x" * size)
    found = read_gguf(write([pad], TENSORS))
    end = (
        4 + 4 + 8 + 8 + len(pad) + sum(len(string(n)) + 4 + 8 * len(s) + 12 for n, _, s in TENSORS)
    )
    assert found.data_start == (end + 31) // 32 * 32
    assert found.tensors[0].offset == found.data_start


def test_the_last_tensor_with_and_without_padding(write):
    for padding in (True, False):
        assert read_gguf(write(VALUES, TENSORS, last_padding=padding)).tensors[-1].nbytes == 10
    refused(write(VALUES, TENSORS, more=b"x"), "after the last tensor", "byte ")
    refused(write(VALUES, TENSORS, more=bytes(32)), "after the last tensor")


def test_no_tensors(write):
    assert read_gguf(write(VALUES)).tensors == ()
    path = write([value("x", "u8", 1)])
    path.write_bytes(path.read_bytes()[: 24 + len(value("x", "u8", 1))])
    assert read_gguf(path).tensors == ()


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_other_alignments(write, alignment):
    key = value("general.alignment", "u32", alignment)
    found = read_gguf(write([key], TENSORS, alignment=alignment))
    assert found.alignment == alignment and found.data_start % alignment == 0


@pytest.mark.parametrize(
    "key, says",
    [
        (value("general.alignment", "u32", 0), "power of two"),
        (value("general.alignment", "u32", 48), "power of two"),
        (value("general.alignment", "u64", 32), "no u32"),
        (value("general.alignment", "u32[]", [32]), "no u32"),
        (value("", "u32", 1), "is empty"),
        (value("a\nb", "u32", 1), "cannot be written"),
        (value(b"\xff", "u32", 1), "not UTF-8"),
        (string("k") + struct.pack("<I", 13), "unknown type"),
        (string("k") + struct.pack("<IIQ", 9, 9, 0), "array of arrays"),
        (string("k") + struct.pack("<IIQ", 9, 4, 1 << 62), "cut short"),
        (string("k") + struct.pack("<IIQ", 9, 8, 1 << 62), "claims more"),
        (string("k") + struct.pack("<IQ", 8, 1 << 63), "cut short"),
        (struct.pack("<Q", 1 << 40), "too long"),
    ],
)
def test_a_key_that_has_no_meaning(write, key, says):
    text = refused(write([key], TENSORS), says)
    assert "byte " in text


def test_a_key_or_a_tensor_that_is_there_twice(write):
    refused(write([*VALUES, VALUES[1]]), "x.n", "twice", "byte ")
    refused(write(VALUES, [*TENSORS, TENSORS[0]]), "tensor a.weight", "twice")


@pytest.mark.parametrize(
    "change, says",
    [
        ({"magic": b"GGML"}, "not a GGUF file"),
        ({"magic": b"\0\0\0\0"}, "not a GGUF file"),
        ({"version": 1}, "convert the model again"),
        ({"version": 4}, "found 4"),
        ({"version": 3 << 24}, "big-endian"),
        ({"counts": (1 << 60, 0)}, "claims more tensors"),
        ({"counts": (0, 1 << 60)}, "claims more keys"),
        ({"offsets": {"b.weight": 64}}, "tensor b.weight"),
        ({"offsets": {"b.weight": 128}}, "expected byte 96 of the data, found byte 128"),
        ({"offsets": {"c": 1 << 63}}, "tensor c"),
    ],
)
def test_fields_that_are_wrong(write, change, says):
    refused(write(VALUES, TENSORS, **change), says)


def test_a_big_endian_file(tmp_path):
    path = tmp_path / "big.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(32))
    refused(path, "big-endian")


@pytest.mark.parametrize(
    "tensor, says",
    [
        (("t", 31, (4,), b""), "unknown tensor type; found 31"),
        (("t", 4, (32,), b""), "unknown tensor type"),
        (("t", 43, (32,), b""), "unknown tensor type"),
        (("t", 0xFFFFFFFF, (32,), b""), "unknown tensor type"),
        (("t", Q8_0, (33,), b""), "multiple of 32, found 33"),
        (("t", F32, (1, 1, 1, 1, 1)), "at most 4, found 5"),
        (("t", F32, (1 << 40, 1 << 40), b""), "more than any file"),
        (("t", F32, (1 << 32, 1 << 32, 1 << 32, 1), b""), "more than any file"),
        (("t", F32, (0, 1 << 63), b""), "more than any file"),
        (("t", F32, ((1 << 62) - 1, 1), b""), "more than any file"),
        (("t", F32, (1 << 61, 0, 1 << 61), b""), None),
        (("x" * 64, F32, (4,)), "too long"),
        (("", F32, (4,)), "is empty"),
        (("t", F32, (64,), bytes(64)), "cut short"),
    ],
)
def test_a_tensor_that_has_no_meaning(write, tensor, says):
    if says is None:
        assert read_gguf(write(VALUES, [tensor])).tensors[0].nbytes == 0
    else:
        text = refused(write(VALUES, [tensor]), says)
        assert "tensor " in text


def test_what_is_no_file(tmp_path):
    refused(tmp_path / "absent", "No such file")
    refused(tmp_path, "not a regular file")
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", "not a regular file")
    (tmp_path / "empty").touch()
    refused(tmp_path / "empty", "empty", "download it again")
    (tmp_path / "lfs").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refused(tmp_path / "lfs", "git lfs pull")


def test_a_header_without_its_file(write):
    path = write(VALUES, TENSORS)
    found = read_gguf(path, file=2)
    head, size = found.raw_header, found.size
    again = parse_header(head, size, path, file=2)
    assert again.tensors == found.tensors and again.raw_header == head
    assert {k: v.encoded for k, v in again.values.items()} == {
        k: v.encoded for k, v in found.values.items()
    }
    for end in (20, len(head) // 2, len(head) - 1):
        with pytest.raises(GgufError, match="the header is cut short"):
            parse_header(head[:end], size, path)


def test_types_are_those_of_gguf_py():
    theirs = {t.value: t for t in gguf.GGMLQuantizationType}
    for number, name in types.known_types().items():
        if number in theirs and name != "Q8_1":  # 40 bytes there; the struct has 36
            assert name == theirs[number].name
            assert types.block_of(number) == gguf.GGML_QUANT_SIZES[theirs[number]]
    assert set(theirs) <= set(types.known_types())
    assert types.block_of(42) == (64, 18)
    with pytest.raises(GgufError, match="found 31"):
        types.block_of(31)
