"""Our own trace format: written while the model runs, and valid whenever the writer is killed.

A file is a row of Zstandard frames, each with its size and a checksum, so ``zstd -dc`` opens it
too. The first frame is one line of JSON that says what follows (``format`` "mbolt-trace",
``version`` 1, ``model``, ``layers``: [{``layer``, ``experts``, ``top_k``, ``expert_bytes``?,
``pieces``?}]). Every further frame holds whole records:

    u8 flags     bit 0: decode, else prefill; bit 1: a new pass; bit 2: a new session;
                 bit 3: ids of 2 bytes, else of 1
    u8 0, u16 layer, u16 top_k, u32 tokens, ids[tokens · top_k]          (little-endian)
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import zstandard

from mbolt_mlx import __version__
from mbolt_mlx.core import files, streams
from mbolt_mlx.core.errors import OutputError, TraceError
from mbolt_mlx.core.head import read_head
from mbolt_mlx.profile.traces import DECODE, PREFILL, LayerInfo, Pass, Trace, make_trace

log = logging.getLogger(__name__)

FORMAT, VERSION = "mbolt-trace", 1
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_RECORD = struct.Struct("<BBHHI")
_DECODE, _NEW_PASS, _NEW_SESSION, _WIDE = 1, 2, 4, 8
_FRAME_MAX = 256 << 20
_CHUNK = 64 << 10
_Record: TypeAlias = tuple[str, int, np.ndarray, bool]  # phase, layer, ids, new session


class Recorder:
    """Writes a trace while a model runs.

    ``record`` only keeps a reference; every ``seconds``, or when ``nbytes`` of ids have come
    together, one frame is compressed and appended. A drive that fails ends the trace with a
    warning, not the model.

    Args:
        path: the file; an older one is overwritten only if it is a trace or empty.
        layers: layer number → what is known of it.
        model: name of the model.
        seconds, nbytes: when to write.

    Raises:
        OutputError: when the file cannot be written, is something else, or is being written by
            another recorder. A file that was made and got no header is removed.
    """

    def __init__(
        self,
        path: str | Path,
        layers: Mapping[int, LayerInfo],
        *,
        model: str = "",
        seconds: float = 2.0,
        nbytes: int = 4 << 20,
    ) -> None:
        self.path = Path(path)
        self._seconds, self._limit = seconds, nbytes
        self._wide = {layer: info.experts > 256 for layer, info in layers.items()}
        self._pending: list[_Record] = []
        self._held = 0
        self._session = False
        self._last: tuple[str, int] | None = None
        self._compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
        refuse_other(self.path)
        self._end = 0
        self._fd = self._open()
        try:
            files.truncate(self._fd, 0, path=str(self.path))
            self._append(_header(layers, model))
        except BaseException:
            if self._new:  # a trace without a header is of no use to anyone
                files.unlink(self.path)
            self._shut()
            raise
        self._due = time.monotonic() + seconds

    def record(self, phase: str, layer: int, ids: np.ndarray) -> None:
        """Note one layer's choices ``ids`` ``[tokens, top_k]``; the array must not change later."""
        self._pending.append((phase, layer, ids, self._session))
        self._session = False
        self._held += ids.size
        if self._held >= self._limit or time.monotonic() >= self._due:
            self.flush()

    def new_session(self) -> None:
        """What comes next belongs to another conversation."""
        self._session = True

    def flush(self) -> None:
        """Write what was recorded so far."""
        pending, self._pending, self._held = self._pending, [], 0
        self._due = time.monotonic() + self._seconds
        if not pending or self._fd < 0:
            return
        try:
            self._append(b"".join(self._encode(pending)))
        except OutputError as error:
            log.warning("the trace ends here: %s", error)
            self._shut()

    def close(self) -> None:
        """Write the rest and close the file."""
        self.flush()
        self._shut()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        """The trace's descriptor, locked until it is closed."""
        self._new = not self.path.exists()
        fd = files.open_write(self.path)
        if not files.try_lock(fd):
            files.close(fd)
            raise OutputError("another process is writing this trace", path=self.path)
        return fd

    def _shut(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            files.close(fd)

    def _append(self, data: bytes) -> None:
        frame = self._compressor.compress(data)
        files.pwrite_all(self._fd, frame, self._end, path=str(self.path))
        self._end += len(frame)

    def _encode(self, pending: list[_Record]) -> Iterator[bytes]:
        """Records of one shape together, which costs a fraction of one by one."""
        for (shape, wide), group in itertools.groupby(pending, self._kind):
            some = list(group)
            tokens, k = math.prod(shape[:-1]), shape[-1]
            out = np.zeros(len(some), _record_type(tokens * k, wide))
            out["flags"] = [self._flags(phase, layer, new) for phase, layer, _, new in some]
            out["flags"] |= _WIDE if wide else 0
            out["layer"] = [layer for _, layer, _, _ in some]
            out["k"], out["tokens"] = k, tokens
            out["ids"] = np.stack([ids for _, _, ids, _ in some]).reshape(len(some), -1)
            yield out.tobytes()

    def _kind(self, record: _Record) -> tuple[tuple[int, ...], bool]:
        return record[2].shape, self._wide.get(record[1], True)

    def _flags(self, phase: str, layer: int, session: bool) -> int:
        last, self._last = self._last, (phase, layer)
        new = last is None or session or phase != last[0] or layer <= last[1]
        return (
            (_DECODE if phase == DECODE else 0)
            | (_NEW_PASS if new else 0)
            | (_NEW_SESSION if session else 0)
        )


def _record_type(count: int, wide: bool) -> np.dtype:
    return np.dtype(
        [
            ("flags", "u1"),
            ("zero", "u1"),
            ("layer", "<u2"),
            ("k", "<u2"),
            ("tokens", "<u4"),
            ("ids", "<u2" if wide else "u1", (count,)),
        ]
    )


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write ``trace`` as a file of this format.

    Raises:
        OutputError: when it cannot be written.
    """
    session = trace.passes[0].session if trace.passes else 0
    with Recorder(path, trace.layers, model=trace.model, seconds=1e9) as recorder:
        for one in trace.passes:
            if one.session != session:
                session = one.session
                recorder.new_session()
            for layer, ids in one.chosen.items():
                recorder.record(one.phase, layer, ids)


def is_ours(data: bytes) -> bool:
    """Whether ``data`` begins as a file of this format does."""
    if not data.startswith(_ZSTD_MAGIC):
        return False
    try:
        first, _ = _frame(memoryview(data), 0, None)
    except TraceError:
        return False
    return first is not None and first.startswith(b'{"format": "mbolt-trace"')


def decode(data: bytes, path: str | Path | None = None) -> Trace:
    """Read a trace of this format, up to its last complete frame.

    Raises:
        TraceError: when the header has no meaning, or a frame is damaged before the end.
    """
    view = memoryview(data)
    first, position = _frame(view, 0, path)
    if first is None:
        raise TraceError("the header is cut short", path=path)
    layers, model = _read_header(first, path)
    passes: list[Pass] = []
    notes: list[str] = []
    current: dict[int, np.ndarray] = {}
    phase, session = PREFILL, 0
    while position < len(data):
        content, end = _frame(view, position, path)
        if content is None:
            notes.append("the trace was cut off; all that was complete is there")
            break
        for flags, layer, ids in _records(content, layers, path, position):
            if flags & _NEW_PASS or not passes:
                session += bool(flags & _NEW_SESSION and passes)
                phase = DECODE if flags & _DECODE else PREFILL
                current = {}
                passes.append(Pass(phase, current, session))
            current[layer] = ids
        position = end
    return make_trace(passes, layers, model=model, notes=notes, path=path)


def _header(layers: Mapping[int, LayerInfo], model: str) -> bytes:
    def known(layer: int, info: LayerInfo) -> dict[str, Any]:
        entry = {"layer": layer, "experts": info.experts, "top_k": info.top_k}
        if info.expert_bytes is not None:
            entry["expert_bytes"] = info.expert_bytes
        if info.pieces is not None:
            entry["pieces"] = info.pieces
        return entry

    head = {
        "format": FORMAT,
        "version": VERSION,
        "tool": f"mbolt-mlx {__version__}",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "record": "u8 flags (1 decode, 2 new pass, 4 new session, 8 ids of 2 bytes), u8 0, "
        "u16 layer, u16 top_k, u32 tokens, ids; little-endian",
        "layers": [known(layer, info) for layer, info in sorted(layers.items())],
    }
    return json.dumps(head).encode() + b"\n"


def _read_header(line: bytes, path: str | Path | None) -> tuple[dict[int, LayerInfo], str]:
    try:
        head = json.loads(line)
        version = head["version"]
        layers = {
            int(one["layer"]): LayerInfo(
                int(one["experts"]),
                int(one["top_k"]),
                one.get("expert_bytes"),
                one.get("pieces"),
            )
            for one in head["layers"]
        }
        model = str(head.get("model", ""))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise TraceError("the header has no meaning", path=path) from None
    if version != VERSION:
        raise TraceError("unknown version", path=path, expected=VERSION, found=version)
    return layers, model


def _frame(view: memoryview, start: int, path: str | Path | None) -> tuple[bytes | None, int]:
    """(content, end) of the frame at ``start``; content None where the file ends within it."""
    try:
        known = zstandard.get_frame_parameters(view[start : start + 32])
        if known.content_size > _FRAME_MAX:
            raise TraceError("a frame is too large", path=path, offset=start)
        reader = zstandard.ZstdDecompressor().decompressobj()
        parts, position = [], start
        while position < len(view) and not reader.eof:
            piece = view[position : position + _CHUNK]
            parts.append(reader.decompress(piece))
            position += len(piece)
    except zstandard.ZstdError as error:
        if len(view) - start < 32:
            return None, len(view)
        raise TraceError(f"a frame is damaged: {error}", path=path, offset=start) from error
    if not reader.eof:
        return None, len(view)
    return b"".join(parts), position - len(reader.unused_data)


def _records(
    content: bytes, layers: Mapping[int, LayerInfo], path: str | Path | None, offset: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    position = 0
    while position < len(content):
        if position + _RECORD.size > len(content):
            raise TraceError("a record is cut short", path=path, offset=offset)
        flags, _, layer, k, tokens = _RECORD.unpack_from(content, position)
        start = position + _RECORD.size
        position = start + k * tokens * (2 if flags & _WIDE else 1)
        if position > len(content):
            raise TraceError("a record is cut short", path=path, offset=offset)
        if layer not in layers or not k:
            raise TraceError(
                "a record is of a layer that the header does not name",
                path=path,
                offset=offset,
                found=layer,
            )
        ids = np.frombuffer(content, "<u2" if flags & _WIDE else "u1", k * tokens, start)
        yield flags, layer, ids.reshape(tokens, k).astype(np.int32)


def refuse_other(path: Path, is_trace: Callable[[bytes], bool] = is_ours) -> None:
    """Never overwrite a file that is not a trace, as ``is_trace`` says of its first bytes.

    Raises:
        OutputError: when ``path`` is one, or is in no folder.
    """
    if not path.parent.is_dir():
        raise OutputError("no such folder", path=path.parent)
    if path.is_dir():
        raise OutputError("a folder is there already", path=path)
    if not path.exists() or path.stat().st_size == 0:
        if streams.is_special(path):
            raise OutputError("a pipe or a device; name a file", path=path)
        return
    if not is_trace(read_head(path, _CHUNK)):
        raise OutputError("another file is there already, and it is not a trace", path=path)
