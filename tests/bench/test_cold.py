import sys

import pytest

from mbolt_mlx.bench import cold
from mbolt_mlx.bench.counters import Counters, drive_read_bytes, peak_rss_bytes, rss_bytes
from mbolt_mlx.core.errors import ReadError

linux = pytest.mark.skipif(sys.platform != "linux", reason="counts of the Linux kernel")


def test_cold_needs_95_percent_of_the_missed_bytes():
    verdict = cold.judge([("prefill", 1000, 950), ("decode", 1000, 1200)])
    assert verdict.cold and verdict.share == pytest.approx(1.075) and verdict.reason is None
    verdict = cold.judge([("prefill", 1000, 949), ("decode", 1000, 1200)])
    assert not verdict.cold and "prefill" in verdict.reason and "0.95" in verdict.reason


def test_each_phase_is_judged_apart():
    """A prefill that reads ahead must not pay for a decode that came out of the page cache."""
    verdict = cold.judge([("prefill", 1000, 5000), ("decode", 1000, 0)])
    assert not verdict.cold and "decode" in verdict.reason and "--direct" in verdict.reason


def test_a_phase_without_misses_proves_nothing():
    assert cold.judge([("prefill", 0, 0), ("decode", 100, 100)]).cold
    nothing = cold.judge([("prefill", 0, 4096), ("decode", 0, 0)])
    assert not nothing.cold and nothing.reason is None and nothing.share is None


def test_without_a_count_nothing_is_cold():
    verdict = cold.judge([("prefill", 100, None)])
    assert not verdict.cold and "does not count" in verdict.reason


def test_weight_files_are_found_once(tmp_path):
    folder = tmp_path / "model"
    (folder / "experts").mkdir(parents=True)
    inner = folder / "experts" / "layer_0.safetensors"
    outer = folder / "model.safetensors"
    for path in (inner, outer, folder / "config.json"):
        path.write_bytes(b"x")
    link = tmp_path / "link.safetensors"
    link.symlink_to(outer)
    assert cold.weight_files(folder, link, None) == [inner.resolve(), outer.resolve()]


def test_drop(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"x" * 8192)
    cold.drop([path])
    assert path.read_bytes() == b"x" * 8192
    with pytest.raises(ReadError):
        cold.drop([tmp_path / "absent"])


@linux
def test_counters():
    before = Counters.read()
    after = Counters.read().since(before)
    assert after.time_s >= 0 and after.cpu_s >= 0 and after.drive_read_bytes >= 0
    assert drive_read_bytes() >= 0
    assert 0 < rss_bytes() and 0 < peak_rss_bytes()


def test_an_unknown_count_stays_unknown():
    assert Counters(2.0, 1.0, None).since(Counters(1.0, 0.5, 7)) == Counters(1.0, 0.5, None)
