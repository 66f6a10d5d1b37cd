"""Load a model without its experts, and put slots in their place."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import utils as mlx_lm_utils
from tqdm import tqdm

from mbolt_mlx import names
from mbolt_mlx.core import files, memory, reads
from mbolt_mlx.core.budget import (
    DEFAULT_SHARE,
    PLANNED_CHUNK,
    PLANNED_CONTEXT,
    WORKING_BYTES,
    Geometry,
    LayerShape,
    geometry_of,
    slot_bytes,
    slots_at,
    slots_within,
)
from mbolt_mlx.core.errors import MemoryLimitError, ReadError, UnsupportedError, UsageError
from mbolt_mlx.core.residency import DEFAULT_POLICY
from mbolt_mlx.core.sizes import format_size, parse_size
from mbolt_mlx.engine.fetch import Fetcher
from mbolt_mlx.engine.layer import OffloadedLayer
from mbolt_mlx.engine.locate import build
from mbolt_mlx.engine.runtime import Ceiling, Engine, attach
from mbolt_mlx.engine.stats import Stats
from mbolt_mlx.engine.swap import (
    activation_bytes,
    check_backend,
    dense_bytes,
    evaluate,
    install,
    limit_cache,
    match,
)
from mbolt_mlx.storage import store as stores
from mbolt_mlx.storage.checkpoint import Checkpoint, read_header
from mbolt_mlx.storage.experts import ExpertLayer
from mbolt_mlx.storage.locate import SideFile, find_side_file, open_side_file
from mbolt_mlx.storage.store import Store

log = logging.getLogger(__name__)


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    resident: float | None = None,
    memory_limit: int | str | None = None,
    side_file: str | Path | None = "auto",
    policy: str = "default",
    read_threads: int | None = None,
    direct: bool | None = None,
) -> tuple[Any, ...]:
    """Load a mixture-of-experts model with part of its experts in memory.

    Takes every argument of ``mlx_lm.load`` and returns what it returns, so it can stand in for it.

    Args:
        path_or_hf_repo: a folder, a hub repository, or a short name such as ``Qwen3-235B``.
        tokenizer_config, model_config, adapter_path, return_config, revision, trust_remote_code:
            as in ``mlx_lm.load``. An adapter on experts is refused.
        lazy: as in ``mlx_lm.load``, for what is not an expert.
        resident: fraction of each layer's experts to keep in memory, over 0 and up to 1.
        memory_limit: bytes (or "24GB") for the whole process, instead of ``resident``. With
            neither, everything that fits in 70 % of the memory.
        side_file: "auto" uses the one of the default place if it matches; a path must match;
            None reads the model's own files.
        policy: who stays in memory: "lru", "decayed", "markov", or "default" (markov).
        read_threads: reads in flight at a time; of direct ones Linux is handed up to twice as many.
        direct: bypass the page cache; None decides by whether the experts fit into free memory.

    Returns:
        ``(model, tokenizer)``, and the config with ``return_config``.

    Raises:
        MboltError: for anything wrong with the input, in one line.
    """
    _check_options(resident, memory_limit, read_threads)
    folder = names.resolve(str(path_or_hf_repo), revision=revision)
    checkpoint = Checkpoint.open(folder)
    for warning in checkpoint.warnings:
        log.warning(warning)
    used = memory.process_rss()
    model, config, layers = _build(checkpoint, model_config, trust_remote_code)
    if adapter_path is not None:
        _check_adapter(Path(adapter_path), layers)
    widen = check_backend(layers, checkpoint)
    store = open_store(checkpoint, layers, side_file)
    limit_cache()
    places = match(model, config, store, checkpoint, widen=widen)
    if widen:
        log.info("the CPU runs unquantised 16-bit experts as float32, so all is converted to it")
        model.set_dtype(mx.float32)
    shapes = [place.shape for place in places]
    dense = dense_bytes(model, places)
    geometry = geometry_of(config, activation_bytes(model))
    limit = _limit(resident, memory_limit)
    slots = _slots(shapes, resident, limit, used + dense, geometry)
    fetcher = Fetcher(
        store,
        threads=read_threads or reads.THREADS,
        direct=_direct(direct, store, slot_bytes(shapes, slots) + dense),
    )
    try:
        layers_at_work = install(places, slots, fetcher, policy, widen=widen)
        if not lazy:
            evaluate(model)
        fetcher.open()
        _fill([layer for _, layer, _ in layers_at_work])
    except BaseException:
        fetcher.close()
        raise
    stats = Stats(
        dense_bytes=dense,
        slot_bytes=slot_bytes(shapes, slots),
        expert_bytes=store.nbytes,
        layers=len(getattr(model, "layers", places)),
        offloaded_layers=len(places),
        slots={p.store.layer: n for p, n in zip(places, slots, strict=True)},
        experts={p.store.layer: p.store.experts for p in places},
        resident=sum(slots) / sum(shape.experts for shape in shapes),
        side_file=str(store.side_file) if store.side_file else None,
        policy=DEFAULT_POLICY if policy == "default" else policy,
        direct=fetcher.direct,
        read_threads=fetcher.threads,
    )
    ceiling = Ceiling(limit, geometry) if memory_limit is not None else None
    attach(model, Engine(layers_at_work, fetcher, stats, ceiling))
    if adapter_path is not None:
        model = mlx_lm_utils.load_adapters(model, adapter_path)
        model.eval()
        evaluate(model)
    tokenizer = mlx_lm_utils.load_tokenizer(
        folder, tokenizer_config, eos_token_ids=config.get("eos_token_id", None)
    )
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def _build(
    checkpoint: Checkpoint, model_config: dict[str, Any] | None, trust_remote_code: bool
) -> tuple[Any, dict[str, Any], Sequence[ExpertLayer]]:
    built = build(checkpoint, model_config=model_config, trust_remote_code=trust_remote_code)
    return built.model, built.config, built.layers


def open_store(
    checkpoint: Checkpoint, layers: Sequence[ExpertLayer], side_file: str | Path | None
) -> Store:
    """The side-file that was named or found, or else the model's own files.

    Raises:
        SideFileError: if a named side-file is damaged or belongs to another source.
        UnsupportedError: if mlx-lm computes the experts, and there is no side-file of them.
    """
    computed = next((layer for layer in layers if layer.computed), None)
    reason = None
    if side_file not in (None, "auto"):
        return _opened(open_side_file(side_file, checkpoint, layers), layers)
    if side_file == "auto":
        found, reason = find_side_file(checkpoint, layers)
        if found is not None:
            return _opened(found, layers)
    if computed is not None:
        because = f"its side-file cannot be used: {reason}" if reason else "it needs a side-file"
        raise UnsupportedError(
            f"mlx-lm computes the experts of {computed.module} from the file, so {because}",
            path=checkpoint.path,
            hint=f"run mbolt-mlx coalesce --model {checkpoint.path} once",
        )
    if reason:
        log.warning("%s; reading the model's own files", reason)
    return stores.from_shards(checkpoint, layers)


def _opened(side_file: SideFile, layers: Sequence[ExpertLayer]) -> Store:
    for warning in side_file.warnings:
        log.warning(warning)
    return stores.from_side_file(side_file, layers)


def _check_options(
    resident: float | None, memory_limit: int | str | None, read_threads: int | None
) -> None:
    if resident is not None and memory_limit is not None:
        raise UsageError("resident and memory_limit exclude each other", hint="give one of them")
    if resident is not None and not (isinstance(resident, Real) and 0.0 < resident <= 1.0):
        raise UsageError(
            f"resident is {resident}", expected="a fraction over 0 and up to 1, such as 0.2"
        )
    if read_threads is not None and not 1 <= read_threads <= 256:
        raise UsageError(f"read_threads is {read_threads}", expected="1 to 256")


def _check_adapter(folder: Path, layers: Sequence[ExpertLayer]) -> None:
    """Refuse an adapter that changes experts before anything is loaded."""
    path = folder / "adapters.safetensors"
    if not path.is_file():
        raise UsageError(
            "not the folder of an adapter",
            path=folder,
            expected="adapters.safetensors and adapter_config.json, as mlx_lm.lora writes them",
        )
    tensors, *_ = read_header(path)
    modules = [layer.module for layer in layers]
    for name in tensors:
        for module in modules:
            if name.startswith(module + "."):
                raise UnsupportedError(
                    "the adapter changes experts, and offloaded experts cannot be adapted",
                    path=path,
                    tensor=name,
                    hint="train it on the attention layers only, or load with mlx_lm.load",
                )


def _limit(resident: float | None, memory_limit: int | str | None) -> int:
    """Bytes for the whole process."""
    if memory_limit is not None:
        return parse_size(memory_limit)
    return int(memory.total_memory() * (1.0 if resident is not None else DEFAULT_SHARE))


def _slots(
    shapes: Sequence[LayerShape],
    resident: float | None,
    limit: int,
    used: int,
    geometry: Geometry,
) -> list[int]:
    """Slots a layer, by the fraction or by what the limit leaves."""
    if resident is not None:
        slots = slots_at(shapes, resident)
        raised = [
            n for n, shape in zip(slots, shapes, strict=True) if n > resident * shape.experts + 1
        ]
        if raised:
            log.warning(
                "%g of the experts is less than a token uses: keeping %d a layer (top-k)",
                resident,
                max(raised),
            )
        return slots
    spare = geometry.beside_weights(PLANNED_CONTEXT, PLANNED_CHUNK, WORKING_BYTES)
    try:
        return slots_within(shapes, limit - used - spare)
    except MemoryLimitError as error:
        least = slot_bytes(shapes, slots_at(shapes, 0.0))
        raise MemoryLimitError(
            f"the model does not run in {format_size(limit)}: the process and the dense weights "
            f"take {format_size(used)}, tokenizer, context and working space {format_size(spare)}",
            expected=f"at least {format_size(used + spare + least)}",
            hint="raise the memory limit",
        ) from error


def _direct(asked: bool | None, store: Store, weights: int) -> bool:
    """Whether to bypass the page cache: where it could not hold the experts anyway."""
    if asked is False:
        return False
    if asked is None and store.nbytes <= 0.8 * (memory.available_memory() - weights):
        return False
    try:
        for path in store.files:
            files.close(files.open_read(path, direct=True))
    except ReadError:
        if asked:
            raise
        return False
    return True


def _fill(layers: Sequence[OffloadedLayer]) -> None:
    """Read the layers that fit whole, and of the others what a profile found hottest."""
    todo = [layer for layer in layers if layer.whole or layer.slots.store.heat is not None]
    total = sum(layer.slots.nbytes for layer in todo)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="experts", disable=None, leave=False
    ) as bar:
        for layer in todo:
            if layer.whole:
                layer.fill()
            else:
                layer.seed()
            bar.update(layer.slots.nbytes)
