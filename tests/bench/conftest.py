import json

import pytest

from mbolt_mlx.resources import resource


@pytest.fixture(scope="session")
def bench_schema():
    return json.loads(resource("manifests/schemas/bench.schema.json").read_text())
