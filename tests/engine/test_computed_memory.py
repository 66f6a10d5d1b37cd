"""A side-file of computed experts is written with two layers of experts in memory, not all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine import architectures, quantised, raw

LAYERS, EXPERTS = 12, 16
# Windows, buffers of reads, and what the allocator keeps.
SLACK = 64 << 20

SCRIPT = """
import json, sys
from mbolt_mlx.bench.counters import peak_rss_bytes as peak
from mbolt_mlx.engine.compute import open_experts
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.coalesce import coalesce

checkpoint = Checkpoint.open(sys.argv[1])
layers, computer = open_experts(checkpoint)
before = peak()
coalesce(checkpoint, layers, sys.argv[2], progress=False, computer=computer, verify=False)
layer = layers[0]
print(json.dumps([before, peak(), layer.experts * layer.block_bytes, len(layers)]))
"""


def transposed() -> quantised.Made:
    text = {
        **architectures.CONFIGS["llama4"]["text_config"], "num_hidden_layers": LAYERS,
        "interleave_moe_layer_step": 1, "num_local_experts": EXPERTS, "hidden_size": 512,
        "intermediate_size": 256,
    }  # fmt: skip
    model, config = architectures.build("llama4", text_config=text)
    return raw.RAW["llama4"]["transposed"](raw.converted(model)), config


def fp8() -> quantised.Made:
    """Half the bytes of what is computed of them, a tensor for each expert."""
    return quantised.fp8(
        "deepseek_v3", num_hidden_layers=LAYERS, n_routed_experts=2 * EXPERTS, hidden_size=512,
        moe_intermediate_size=256, first_k_dense_replace=0,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("make", [transposed, fp8])
def test_two_layers_of_experts_are_in_memory(
    make: Callable[[], quantised.Made], tmp_path: Path
) -> None:
    tensors, config = make()
    dense = sum(a.nbytes for name, a in tensors.items() if ".experts." not in name)
    folder = architectures.save(tmp_path / "model", tensors, config)
    del tensors
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path / "experts")],
        capture_output=True, text=True, check=True,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    before, peak, layer, layers = json.loads(done.stdout)
    assert layers == LAYERS
    assert layers * layer > 2 * (dense + 2 * layer + SLACK)  # else it would prove nothing
    assert peak - before < dense + 2 * layer + SLACK
