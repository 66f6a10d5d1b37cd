"""Loaded on one thread and used on others, by turns, and lazily."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

import mbolt_mlx
from tests.engine.kit import ids, load, prefill_then_decode

SHAPE = dict(experts=16, top_k=4)


def elsewhere(action):
    """What ``action`` returns on a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result(timeout=120)


@pytest.mark.ends
@pytest.mark.parametrize("resident", [0.25, 1.0])
def test_loaded_on_one_thread_and_used_on_another(make, stock, resident):
    path = make(**SHAPE)
    stock_model, tokenizer = stock(path)
    wanted = mlx_lm.generate(stock_model, tokenizer, "once upon a time", max_tokens=12)

    def say():
        return mlx_lm.generate(model, tokenizer, "once upon a time", max_tokens=12)

    model = elsewhere(lambda: load(path, resident=resident))
    assert say() == wanted
    model = load(path, resident=resident)
    assert elsewhere(say) == wanted
    model = elsewhere(lambda: load(path, resident=resident))
    assert elsewhere(say) == wanted and say() == wanted


def test_two_threads_at_once_with_caches_of_their_own(make, stock_logits):
    path = make(**SHAPE)
    model = load(path, resident=0.25)
    shapes = [(1, 30, 10), (2, 17, 10), (1, 5, 10)]
    start = threading.Barrier(len(shapes))

    def work(shape):
        start.wait()
        results = []
        for _ in range(3):
            results.append(prefill_then_decode(model, ids(*shape[:2]), shape[2]))
        return results

    wanted = [stock_logits(path, *shape) for shape in shapes]
    with ThreadPoolExecutor(len(shapes)) as pool:
        got = list(pool.map(work, shapes))
    for results, reference in zip(got, wanted, strict=True):
        for result in results:
            for a, b in zip(result, reference, strict=True):
                assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("policy", ["lru", "decayed"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 40)])
def test_calls_that_are_evaluated_later(make, stock, shape, policy):
    """A slot that a lazy result still reads is not overwritten by the next calls."""
    path = make(**SHAPE)
    stock_model, model = stock(path)[0], load(path, resident=0.25, policy=policy)
    inputs = [ids(*shape, seed=seed) for seed in range(12)]
    lazy = [model(x) for x in inputs]
    for x, y in reversed(list(zip(inputs, lazy, strict=True))):
        assert np.array(y).tobytes() == np.array(stock_model(x)).tobytes()
    a, b = model(inputs[0]), model(inputs[1])
    mx.eval(b, a)
    assert np.array(a).tobytes() == np.array(stock_model(inputs[0])).tobytes()
    assert np.array(b).tobytes() == np.array(stock_model(inputs[1])).tobytes()


def test_lazy_calls_on_streams_of_their_own(make, stock):
    path = make(**SHAPE)
    stock_model, model = stock(path)[0], load(path, resident=0.25)
    streams = [mx.new_stream(mx.default_device()) for _ in range(3)]
    inputs = [ids(1, 1, seed=seed) for seed in range(30)]
    lazy = []
    for n, x in enumerate(inputs):
        with mx.stream(streams[n % 3]):
            lazy.append(model(x))
    for x, y in zip(inputs, lazy, strict=True):
        assert np.array(y).tobytes() == np.array(stock_model(x)).tobytes()


def test_two_models_in_one_process(make, stock):
    paths = make(**SHAPE), make(**SHAPE, mode="affine4")
    models = [load(path, resident=0.25) for path in paths]
    for seed in range(4):
        x = ids(1, 9, seed=seed)
        for path, model in zip(paths, models, strict=True):
            assert np.array(model(x)).tobytes() == np.array(stock(path)[0](x)).tobytes()
    assert {mbolt_mlx.stats(model).prefill.tokens for model in models} == {36}
