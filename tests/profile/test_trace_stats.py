"""The figures of a trace, by hand."""

import numpy as np
import pytest

from mbolt_mlx.profile.trace_stats import trace_stats
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace


def made(rows, phase="decode"):
    passes = [Pass(phase, {2: np.array([row])}) for row in rows]
    return make_trace(passes, {2: LayerInfo(4, 2, 100)}, model="m")


def test_figures_by_hand():
    found = trace_stats(made([[0, 1], [0, 1], [0, 2], [0, 3]]), residents=[0.5, 1.0])
    assert found["reuse"] == pytest.approx((1 + 0.5 + 0.5) / 3, abs=1e-6)
    share = np.array([4, 2, 1, 1]) / 8
    assert found["entropy_bits"] == pytest.approx(-(share * np.log2(share)).sum(), abs=1e-6)
    assert found["working_set"] == {"1": 2.0, "4": 4.0}
    assert found["token_bytes"] == 200 and found["never_used"] == 0
    assert found["hit_rates"]["lru"]["0.5"] == 0.5
    assert found["hit_rates"]["belady"]["1"] == 1.0
    (layer,) = found["by_layer"]
    assert layer["hottest"][:2] == [0, 1]
    # Expert 0 fires with every token: being with it is no sign of anything.
    assert layer["lift_mean"] == pytest.approx(1.0)


def test_prefill_counts_where_nothing_was_decoded():
    trace = make_trace([Pass("prefill", {0: np.array([[0, 1], [1, 2]])})], {0: LayerInfo(4, 2)})
    found = trace_stats(trace)
    assert found["by_layer"][0]["tokens"] == 2
    assert found["token_bytes"] is None
    assert found["hit_rates"]["lru"]["0.5"] is None
