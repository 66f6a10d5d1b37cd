"""Traces that claim more than any model has end in one line, whatever their format."""

import json
import struct

import numpy as np
import pytest
import zstandard

from mbolt_mlx.cli.main import main
from mbolt_mlx.profile.trace_file import write_trace
from mbolt_mlx.profile.traces import EXPERTS_MAX, LayerInfo, Pass, make_trace

TOO_MANY = 1 << 20


def ours(experts):
    head = {"format": "mbolt-trace", "version": 1}
    head["layers"] = [{"layer": 3, "experts": experts, "top_k": 2}]
    record = struct.pack("<BBHHI", 3, 0, 3, 2, 1) + bytes([0, 1])
    return b"".join(map(zstandard.compress, (json.dumps(head).encode(), record)))


def mblt(experts):
    return struct.pack("<6I2i", 0x544C424D, 1, experts, 3, 2, 1, 0, 1)


def csv(experts):
    return (
        f"# route_trace model=m n_layer=4 n_expert={experts} n_expert_used=2\n"
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
        "0,1,0,3,0,0,1,0,9\n0,1,0,3,1,1,1,0,9\n"
    ).encode()


@pytest.mark.parametrize("encode", [ours, mblt, csv])
@pytest.mark.parametrize("command", ["trace-stats", "simulate", "cluster"])
def test_more_experts_than_any_model_has(tmp_path, capsys, encode, command):
    path = tmp_path / "t"
    argv = {
        "trace-stats": ["trace-stats", str(path)],
        "simulate": ["simulate", "--trace", str(path), "--resident", "0.5"],
        "cluster": ["cluster", str(path), "-o", str(tmp_path / "p.json")],
    }[command]
    for experts in (TOO_MANY, EXPERTS_MAX + 1):
        path.write_bytes(encode(experts))
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and f"{path}: " in err and f"1 to {EXPERTS_MAX}" in err
        assert "no meaning" in err and "unexpected" not in err
    path.write_bytes(encode(64))
    assert main(argv) == 0


def test_the_most_experts_can_be_told_of(tmp_path, capsys):
    infos = {0: LayerInfo(EXPERTS_MAX, 2)}
    passes = [Pass("decode", {0: np.array([[0, EXPERTS_MAX - 1]])})]
    write_trace(tmp_path / "t", make_trace(passes, infos))
    assert main(["trace-stats", str(tmp_path / "t"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["never_used"] == EXPERTS_MAX - 2
