"""The benchmark of prefetch and layouts, as far as it can be checked without timing anything."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).resolve().parents[2] / "examples" / "bench"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", ["x"])
    return importlib.import_module("gguf_prefetch")


def entry(setting, round_, speed, reads):
    mode = setting.partition("/")[2] or None
    figures = {"tok_s": speed, "issued_reads_per_token": reads, "issued_bytes_per_token": reads}
    return {"setting": setting, "round": round_, "mode": mode, **figures}


def test_ratios_are_of_the_same_round(script):
    runs = [
        entry("stock", 0, 2.0, 0),
        entry("prefetch/read", 0, 4.0, 30),
        entry("interleave/read", 0, 5.0, 10),
        entry("reorder/read", 0, 4.0, 24),
        entry("stock", 1, 1.0, 0),
        {"setting": "prefetch/read", "round": 1, "mode": "read", "error": "x"},
        entry("interleave/read", 1, 5.0, 10),
    ]
    found = script.ratios(runs, ["read"])["read"]
    assert found["prefetch_speed_over_stock"] == {"median": 2.0, "min": 2.0, "max": 2.0, "count": 1}
    assert found["interleave_speed_over_stock"]["max"] == 5.0
    assert found["prefetch_reads_over_interleave"]["median"] == 3.0
    assert found["reorder_reads_over_prefetch"]["median"] == pytest.approx(0.8)


def test_every_setting_of_the_prefetcher_has_the_same_switches(script, monkeypatch):
    monkeypatch.setenv("MBOLT_PREFETCH_STATS", "1")
    args = SimpleNamespace(prefetch_threads=4)
    plain = script.environment(script.Setting("stock"), None, args)
    assert not [name for name in plain if name.startswith("MBOLT_")]
    for layout in script.LAYOUTS:
        found = script.environment(script.Setting(layout, "read"), Path("map"), args)
        assert {k: v for k, v in found.items() if k.startswith("MBOLT_")} == {
            "MBOLT_PREFETCH": "map",
            "MBOLT_PREFETCH_MODE": "read",
            "MBOLT_PREFETCH_THREADS": "4",
            "MBOLT_PREFETCH_ADVICE": "random",
        }


def test_slices_have_the_size_that_is_said(script):
    """221 KB a slice, about 1.1 GB in all."""
    from random_shapes import describe

    made = [t for t in describe(script.SPEC)[1] if "_exps" in t.name]
    elements = {t.shape[0] * t.shape[1] for t in made}
    assert len(made) == 72 and {n // 32 * 18 for n in elements} == {221184}
