"""Models of random bytes for the rewriter, and a slow check of its results that shares no code
with it: gguf-py reads both files, numpy permutes."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import gguf
import numpy as np

from tests.gguf.conftest import F32, encode, size_of, value

TYPES = {"F16": 1, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "IQ4_XS": 23, "MXFP4": 39}
EXPERTS, WIDTH, HIDDEN = 8, 256, 256
# What is indexed by expert, said here once more and in other words than in the package.
BY_EXPERT = re.compile(
    r"blk\.\d+\.(ffn_(gate|up|down|gate_up)_exps\.(weight|bias|scale)"
    r"|ffn_gate_inp\.(weight|bias)|exp_probs_b(\.bias)?)$"
)
BIG = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.weight$")


def values(*, experts=EXPERTS, more=()):
    return [
        value("general.architecture", "str", "test"),
        value("general.name", "str", "Made für tests"),
        value("test.expert_count", "u32", experts),
        value("test.expert_used_count", "u32", 2),
        value("some.bytes", "u8[]", [0, 255, 7]),
        value("some.nothing", "str[]", []),
        value("tokenizer.ggml.tokens", "str[]", [b"\xff\xfe", "", "ü"]),
        value("some.number", "f64", 0.1),
        *more,
    ]


def layer(number, kind=F32, *, experts=EXPERTS, ff=32, roles=("gate", "up", "down"), more=()):
    """One MoE layer; ``more`` are (stem with suffix, type, shape without the experts)."""
    shapes = {"gate": (WIDTH, ff), "up": (WIDTH, ff), "gate_up": (WIDTH, 2 * ff)}
    down = (-(-ff // 256) * 256, WIDTH)
    tensors = [
        (f"blk.{number}.attn_q.weight", F32, (32, 3)),
        (f"blk.{number}.ffn_gate_inp.weight", F32, (WIDTH, experts)),
    ]
    for role in roles:
        shape = shapes.get(role, down)
        tensors.append((f"blk.{number}.ffn_{role}_exps.weight", kind, (*shape, experts)))
    for stem, of, shape in more:
        tensors.append((f"blk.{number}.{stem}", of, (*shape, experts)))
    return tensors


def filled(tensors, seed=0):
    rng = np.random.default_rng(seed)
    return [(name, kind, shape, rng.bytes(size_of(kind, shape))) for name, kind, shape in tensors]


def write_model(path, tensors, keys=None, *, seed=0, split=0, empty_first=False, **more):
    """Write one file, or several of about ``split`` tensors; returns the first."""
    tensors, keys = filled(tensors, seed), list(values() if keys is None else keys)
    if not split:
        path.write_bytes(encode(keys, tensors, **more))
        return path
    parts = [tensors[i : i + split] for i in range(0, len(tensors), split)]
    parts = [[], *parts] if empty_first else parts
    names = [
        path.with_name(f"{path.stem}-{n + 1:05d}-of-{len(parts):05d}.gguf")
        for n in range(len(parts))
    ]
    for n, (name, part) in enumerate(zip(names, parts, strict=True)):
        own = [
            value("split.no", "u16", n),
            value("split.count", "u16", len(parts)),
            value("split.tensors.count", "i32", len(tensors)),
        ]
        name.write_bytes(encode([*(keys if n == 0 else []), *own], part, **more))
    return names[0]


def typed_model(path, **more):
    """A layer of each type, of slices that are no multiples of a page, and dense tensors."""
    tensors = [("token_embd.weight", F32, (32, 7))]
    for number, kind in enumerate(TYPES.values()):
        tensors += layer(number, kind)
    tensors += [("output_norm.weight", F32, (33,)), ("output.weight", F32, (32, 5))]
    return write_model(path, tensors, **more)


def perms_of(path, layers, *, experts=EXPERTS, seed=1, heat=None):
    """Write a perms.json with random orders of ``layers``; returns its document."""
    rng = np.random.default_rng(seed)
    document = {"n_layers": len(layers), "n_expert": experts, "n_tokens": 100, "layers": []}
    for number in layers:
        entry = {"layer": number, "heat": heat or rng.integers(0, 50, experts).tolist()}
        for kind in ("clique", "chain", "heat"):
            entry[f"{kind}_perm"] = rng.permutation(experts).tolist()
        entry["top_cliques"] = [[2, 0], [1, 3, 4]]
        document["layers"].append(entry)
    Path(path).write_text(json.dumps(document))
    return document


def orders_of(document, kind):
    return {y["layer"]: y[f"{kind}_perm"] for y in document["layers"]}


def files_of(first):
    """All files of the model whose first file is ``first``."""
    found = re.search(r"-00001-of-(\d{5})\.gguf$", first.name)
    if not found:
        return [first]
    stem, count = first.name[: found.start()], int(found[1])
    return [first.with_name(f"{stem}-{n + 1:05d}-of-{count:05d}.gguf") for n in range(count)]


def contents(first):
    """Name → (type, shape, bytes) of all tensors, and the fields of the first file."""
    tensors, fields = {}, None
    for path in files_of(first):
        raw = path.read_bytes()
        reader = gguf.GGUFReader(path)
        fields = reader.fields if fields is None else fields
        for t in reader.tensors:
            assert t.name not in tensors
            data = raw[t.data_offset : t.data_offset + int(t.n_bytes)]
            tensors[t.name] = (int(t.tensor_type), tuple(map(int, t.shape)), data)
    return tensors, fields


def field(fields, key):
    found = fields.get(key)
    return None if found is None else found.contents()


def check(original, rewritten, orders):
    """Every byte of ``rewritten`` is that of ``original`` with the experts in ``orders``."""
    was, _ = contents(original)
    now, fields = contents(rewritten)
    blobs = {name for name in now if name.endswith(".ffn_ilv_exps.weight")}
    if blobs:
        now |= taken_apart({name: now.pop(name) for name in blobs}, fields)
    assert set(was) == set(now)
    for name, (kind, shape, data) in was.items():
        number = re.match(r"blk\.(\d+)\.", name)
        order = orders.get(int(number[1])) if number and BY_EXPERT.match(name) else None
        if order is not None:
            assert shape[-1] == len(order)
            rows = np.frombuffer(data, np.uint8).reshape(len(order), -1)
            data = np.stack([rows[e] for e in order]).tobytes()
        assert now[name][:2] == (kind, shape), name
        assert now[name][2] == data, name
    return fields


def taken_apart(blobs, fields):
    """The stacked tensors that the blocks of an interleaved file consist of."""
    roles = field(fields, "mbolt.ilv.role")
    layers = field(fields, "mbolt.layers")
    table = [field(fields, f"mbolt.ilv.{key}") for key in ("type", "ne0", "ne1", "offset")]
    assert field(fields, "mbolt.interleaved") and field(fields, "mbolt.ilv.pieces") == len(roles)
    out = {}
    for i, (kind, ne0, ne1, start) in enumerate(zip(*table, strict=True)):
        number, role = layers[i // len(roles)], roles[i % len(roles)]
        of, (stride, experts), data = blobs[f"blk.{number}.ffn_ilv_exps.weight"]
        assert of == 24 and start % 32 == 0 and stride % 32 == 0
        size = size_of(kind, (ne0, ne1))
        parts = [data[p * stride + start : p * stride + start + size] for p in range(experts)]
        out[f"blk.{number}.ffn_{role}_exps.weight"] = (kind, (ne0, ne1, experts), b"".join(parts))
    return out


def kept_bytes(path):
    """The encoded keys of a file that are not ours, cut out by hand."""
    raw = path.read_bytes()
    tensors, keys = struct.unpack_from("<QQ", raw, 8)
    at, out = 24, []

    def string(at):
        (length,) = struct.unpack_from("<Q", raw, at)
        return at + 8 + length

    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    for _ in range(keys):
        begin, at = at, string(at)
        name = raw[begin + 8 : at].decode()
        (kind,) = struct.unpack_from("<I", raw, at)
        at += 4
        count = 1
        if kind == 9:
            kind, count = struct.unpack_from("<IQ", raw, at)
            at += 12
        for _ in range(count):
            at = string(at) if kind == 8 else at + sizes[kind]
        if not name.startswith("mbolt."):
            out.append(raw[begin:at])
    return out
