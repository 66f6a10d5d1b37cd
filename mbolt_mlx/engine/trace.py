"""Follow tensors of a file through a model's own ``sanitize`` to the arrays that it returns.

mlx-lm renames, stacks, splits, transposes, views and dequantises what it reads. Each lazy array is
wrapped together with its origin: the bytes of the file that it is, if it is just bytes of the
file. Every operation runs on the real arrays and gives what it always gives; those known here
carry the origin along, any other loses it. So an origin is never a guess.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx

from mbolt_mlx.storage.checkpoint import Tensor
from mbolt_mlx.storage.origin import Origin

_lock = threading.Lock()
# Distinct sizes tell from the shape of a result which axis went where.
_PROBE = (2, 3, 5, 7, 11, 13)


class Traced:
    """A lazy array, where its bytes come from (None: computed), and from which tensors."""

    __slots__ = ("array", "origin", "sources")

    def __init__(self, array: mx.array, origin: Origin | None, sources: frozenset[str]) -> None:
        if origin is not None and not origin.matches(array.shape, array.itemsize):
            origin = None
        self.array, self.origin, self.sources = array, origin, sources

    @property
    def __class__(self) -> type:
        # For code that asks isinstance(value, mx.array).
        return mx.array

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.array, name)
        if name == "T":
            return _call("transpose", mx.transpose, self)
        if not callable(value):
            return value
        unbound = getattr(mx.array, name)
        return lambda *args, **kwargs: _call(name, unbound, self, *args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return _call("__getitem__", mx.array.__getitem__, self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.origin = None
        self.array[_bare(key)] = _bare(value)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.array.shape[0]))

    def __len__(self) -> int:
        return len(self.array)

    def __bool__(self) -> bool:
        return bool(self.array)

    def __int__(self) -> int:
        return int(self.array)

    def __float__(self) -> float:
        return float(self.array)

    def __hash__(self) -> int:
        return id(self)


def _operator(name: str) -> Callable[..., Any]:
    unbound = getattr(mx.array, name)
    return lambda self, *args: _call(name, unbound, self, *args)


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul "
    "and or xor invert lshift rshift neg abs eq ne lt le gt ge"
).split():
    if hasattr(mx.array, f"__{_name}__"):
        setattr(Traced, f"__{_name}__", _operator(f"__{_name}__"))


def is_traced(value: Any) -> bool:
    """Whether ``value`` is wrapped; ``isinstance`` cannot tell."""
    return type(value) is Traced


def wrap(name: str, array: mx.array, tensor: Tensor | None) -> Traced:
    """The array that ``mx.load`` gave for ``tensor`` (None: its place is not known)."""
    origin = Origin.of(tensor, array.itemsize) if tensor is not None else None
    return Traced(array, origin, frozenset((name,)))


class _Mx:
    """``mlx.core``, but its functions take wrapped arrays too."""

    def __init__(self, module: ModuleType) -> None:
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, ModuleType):
            return _Mx(value)
        if isinstance(value, type) or not callable(value):
            return value
        return lambda *args, **kwargs: _call(name, value, *args, **kwargs)


@contextmanager
def tracing() -> Iterator[None]:
    """Let the code of mlx-lm's models take wrapped arrays.

    For arrays that are not wrapped, on this thread or any other, nothing changes.
    """
    with _lock:
        proxy = _Mx(mx)
        changed = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith("mlx_lm.models.") and getattr(module, "mx", None) is mx
        ]
        for module in changed:
            module.mx = proxy
        try:
            yield
        finally:
            for module in changed:
                module.mx = mx


def _bare(value: Any) -> Any:
    if type(value) is Traced:
        return value.array
    if type(value) in (list, tuple):
        return type(value)(_bare(v) for v in value)
    if type(value) is dict:
        return {k: _bare(v) for k, v in value.items()}
    return value


def _traced(value: Any) -> Iterator[Traced]:
    if type(value) is Traced:
        yield value
    elif type(value) in (list, tuple):
        for v in value:
            yield from _traced(v)
    elif type(value) is dict:
        yield from _traced(list(value.values()))


def _call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function`` on the real arrays; the result is wrapped if an argument was."""
    wrapped = [*_traced(args), *_traced(kwargs)]
    if not wrapped:
        return function(*args, **kwargs)
    result = function(*_bare(args), **_bare(kwargs))
    single = isinstance(result, mx.array)
    results = [result] if single else result
    if not isinstance(results, (list, tuple)) or not all(isinstance(r, mx.array) for r in results):
        return result
    origins: list[Origin | None] = [None] * len(results)
    rule = _RULES.get(name)
    if rule is not None:
        try:
            origins = rule(function, args, kwargs, results)
        except (TypeError, ValueError, IndexError, AttributeError):
            pass  # called in a way that is not known here
    sources = frozenset().union(*(t.sources for t in wrapped))
    out = [Traced(r, o, sources) for r, o in zip(results, origins, strict=True)]
    return out[0] if single else type(result)(out)


def _origin(value: Any) -> Origin:
    if type(value) is not Traced or value.origin is None:
        raise ValueError
    return value.origin


def _same(_: Any, args: Any, kwargs: Any, results: Any) -> list[Origin | None]:
    return [_origin(args[0])]


def _cast(_: Any, args: Any, kwargs: Any, results: Any) -> list[Origin | None]:
    same = results[0].dtype == args[0].array.dtype
    return [_origin(args[0]) if same else None]


def _reshape(_: Any, args: Any, kwargs: Any, results: Any) -> list[Origin | None]:
    return [_origin(args[0]).reshape(results[0].shape)]


def _view(_: Any, args: Any, kwargs: Any, results: Any) -> list[Origin | None]:
    return [_origin(args[0]).view(results[0].itemsize)]


def _transpose(function: Any, args: Any, kwargs: Any, results: Any) -> list[Origin | None]:
    origin = _origin(args[0])
    probe = mx.zeros(_PROBE[: len(origin.shape)], dtype=mx.bool_)
    after = function(probe, *args[1:], **kwargs).shape
    return [origin.transpose([_PROBE.index(n) for n in after])]


def _split(_: Any, args: Any, kwargs: Any, results: Any) -> list[Origin | None]:
    origin = _origin(args[0])
    axis = kwargs.get("axis", args[2] if len(args) > 2 else 0) % len(origin.shape)
    out, start = [], 0
    for result in results:
        length = result.shape[axis]
        out.append(origin.cut(axis, start, start + length, 1))
        start += length
    return out


def _stack(_: Any, args: Any, kwargs: Any, results: Any) -> list[Origin | None]:
    axis = kwargs.get("axis", args[1] if len(args) > 1 else 0)
    if axis != 0:
        return [None]
    return [Origin.join([o.reshape((1, *o.shape)) for o in map(_origin, args[0])])]


def _concatenate(_: Any, args: Any, kwargs: Any, results: Any) -> list[Origin | None]:
    axis = kwargs.get("axis", args[1] if len(args) > 1 else 0)
    return [Origin.join([_origin(a) for a in args[0]]) if axis == 0 else None]


def _getitem(_: Any, args: Any, kwargs: Any, results: Any) -> list[Origin | None]:
    origin = _origin(args[0])
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(k is not Ellipsis and not isinstance(k, (int, slice)) for k in keys):
        return [None]
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        fill = (slice(None),) * (len(origin.shape) - len(keys) + 1)
        keys = (*keys[:at], *fill, *keys[at + 1 :])
    axis = 0
    found: Origin | None = origin
    for key in keys:
        if found is None:
            break
        if isinstance(key, int):
            at = key % found.shape[axis]
            found = found.cut(axis, at, at + 1, 1)
            if found is not None:
                found = found.reshape((*found.shape[:axis], *found.shape[axis + 1 :]))
            continue
        start, stop, step = key.indices(found.shape[axis])
        found = found.cut(axis, start, stop, step)
        axis += 1
    return [found]


_RULES: dict[str, Callable[..., list[Origin | None]]] = {
    "contiguous": _same,
    "stop_gradient": _same,
    "astype": _cast,
    "view": _view,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "moveaxis": _transpose,
    "split": _split,
    "stack": _stack,
    "concatenate": _concatenate,
    "__getitem__": _getitem,
    **dict.fromkeys(("reshape", "flatten", "unflatten", "squeeze", "expand_dims"), _reshape),
}
