"""The speed law against what others measured and published, row by row."""

import numpy as np
import pytest

from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.profile.law import DEFAULT_LAW, Law, errors, fit, share_of, speedup


def expert_bytes(hidden, width, bits, bias=0):
    return 3 * hidden * width * bits / 8 + bias


# Reads an expert before and after, bytes of one, the law's figure, and the measured one.
COLD_EXPERTS = {
    "Qwen3.6-35B, 8 bits": (9, 1, expert_bytes(2048, 512, 8.5), 2.23, 2.34),
    "gpt-oss-120b, MXFP4": (6, 1, expert_bytes(2880, 2880, 4.25, 3 * 2880 * 2), 1.22, 1.29),
    "Qwen3-235B, 4 bits": (9, 3, expert_bytes(4096, 1536, 4.5), 1.29, 1.34),
}


@pytest.mark.parametrize("row", COLD_EXPERTS)
def test_the_gain_a_cold_expert(row):
    before, after, nbytes, law, measured = COLD_EXPERTS[row]
    gain = DEFAULT_LAW.gain(before, after, nbytes)
    assert gain == pytest.approx(law, abs=0.015)
    assert gain == pytest.approx(measured, rel=0.06)


# Model, residency → measured gain of decoding in all, by a gain of reads.
DECODING = [
    ("Qwen3-235B at 0.2", 1.323, DEFAULT_LAW.gain(9, 1, expert_bytes(4096, 1536, 4.5))),
    ("Qwen3.6-35B at 0.3", 1.176, 2.34),
    ("Qwen3.6-35B at 0.45", 1.143, 2.34),
    ("gpt-oss-120b", 1.097, 1.29),
    ("Qwen3-Next-80B, interleaved, prefetch on both", 9.0 / 7.6, 2.23),
]


@pytest.mark.parametrize(("row", "measured", "gain"), DECODING)
def test_the_gain_of_decoding_is_a_share_that_can_be(row, measured, gain):
    share = share_of(measured, gain)
    assert 0.0 < share < 1.0
    assert speedup(share, gain) == pytest.approx(measured)


def test_the_share_falls_as_more_experts_are_in_memory():
    shares = [share_of(measured, 2.34) for _, measured, _ in DECODING[1:3]]
    assert shares[0] > shares[1]


def test_the_storage_only_row():
    """1,418 → 366 reads a token, 301.7 → 135.4 ms, 2.23 times; the simulator said 2.29."""
    # The bytes a token are not published. They are the same in both rows, so they cancel.
    law = fit([(1418, 1.0, 0.3017), (366, 1.0, 0.1354)])
    assert 100e-6 < law.t_op < 200e-6
    assert law.gain(1418, 366, 1.0) == pytest.approx(2.23, abs=0.005)
    assert law.gain(1418, 366, 1.0) == pytest.approx(2.29, rel=0.03)


def test_the_usb_drive_row():
    """27.0 → 20.4 ms for 9 → 1 reads of one expert: an operation costs eight times an SSD's."""
    law = fit([(9, 1e6, 0.0270), (1, 1e6, 0.0204)])
    assert law.t_op == pytest.approx(825e-6, rel=0.01)
    assert law.t_op > 5 * DEFAULT_LAW.t_op


def test_a_fit_finds_the_constants_again():
    law = Law(130e-6, 2.5e9)
    points = [(1, n, law.seconds(1, n)) for n in (4096, 65536, 1 << 20, 4 << 20)]
    found = fit(points)
    assert found.t_op == pytest.approx(law.t_op) and found.bandwidth == pytest.approx(law.bandwidth)
    assert max(map(abs, errors(found, points))) < 1e-9


def test_a_fit_never_gives_a_cost_below_zero():
    assert fit([(1, 1e6, 1.0), (1, 2e6, 2.5)]).t_op == 0.0
    flat = fit([(1, 1e6, 1.0), (1, 2e6, 0.9)])
    assert flat.bandwidth == float("inf") and 0.9 < flat.t_op < 1.0
    assert flat.seconds(1, 1e9) == flat.t_op


@pytest.mark.parametrize("points", [[], [(1, 1e6, 1.0)], [(1, 1e6, 1.0), (2, 2e6, 2.0)]])
def test_a_fit_needs_two_measurements(points):
    with pytest.raises(UsageError):
        fit(points)


def test_nothing_is_gained_where_nothing_is_read():
    assert speedup(0.0, 5.0) == 1.0
    assert speedup(1.0, 5.0) == pytest.approx(5.0)


SIZES = (4096, 65536, 1 << 18, 1 << 20, 4 << 20, 16 << 20)


def test_a_drive_with_two_limits_is_bound_by_the_slower():
    """2,000 reads a second and 400 MB/s, each for itself, as a control group or a cloud limits."""
    law = Law(500e-6, 4e8, slower=True)
    assert law.seconds(10, 1e6) == pytest.approx(5e-3) and law.seconds(1, 4e6) == pytest.approx(
        0.01
    )
    # Nine pieces or one block: bytes decide, so there is nothing to gain; with small ones there is.
    assert law.gain(9, 1, 8e6) == 1.0 and law.gain(9, 1, 1e5) == pytest.approx(9.0)
    rng = np.random.default_rng(0)
    points = [(1, n, law.seconds(1, n) * rng.uniform(0.97, 1.03)) for n in SIZES]
    found = fit(points)
    assert found.slower
    assert found.t_op == pytest.approx(law.t_op, rel=0.03)
    assert found.bandwidth == pytest.approx(law.bandwidth, rel=0.03)


def test_the_sum_is_kept_unless_the_other_form_is_clearly_better():
    rng = np.random.default_rng(1)
    law = Law(80e-6, 6e8)
    for _ in range(20):
        points = [(1, n, law.seconds(1, n) * rng.uniform(0.93, 1.07)) for n in SIZES]
        assert not fit(points).slower


# A drive held to 2,000 reads a second whose own rate changed twofold meanwhile: four reads at a
# time of 4 KiB to 16 MiB, microseconds a read, as measured.
HELD = [
    (500, 501, 492, 1570, 4730, 14231),
    (500, 500, 489, 1384, 5033, 13395),
    (500, 500, 500, 1041, 5290, 14855),
    (500, 500, 500, 1203, 3472, 11365),
]
BYTES = [n << 10 for n in (4, 64, 256, 1024, 4096, 16384)]


@pytest.mark.parametrize("row", HELD)
def test_reads_that_take_the_same_time_whatever_their_size_show_a_limit(row):
    found = fit([(1, n, us * 1e-6) for n, us in zip(BYTES, row, strict=True)])
    assert found.slower and found.t_op == pytest.approx(500e-6, rel=0.02)


def test_a_far_drive_that_is_fast_is_not_taken_for_a_limited_one():
    """Its small reads take the same time as well, but its large ones take that longer."""
    far = Law(1e-3, 5e9)
    rng = np.random.default_rng(2)
    for _ in range(20):
        found = fit([(1, n, far.seconds(1, n) * rng.uniform(0.98, 1.02)) for n in BYTES])
        assert not found.slower and found.t_op == pytest.approx(1e-3, rel=0.03)
