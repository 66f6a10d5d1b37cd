"""Options of the commands that read a trace, and what they mean."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace

from mbolt_mlx.cli.arguments import GGUF_HELP, MODEL_HELP
from mbolt_mlx.cli.drive import size_of
from mbolt_mlx.cli.headers import Sizes, open_headers
from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.profile.traces import EXPERT_BYTES_MAX, PIECES_MAX, LayerInfo, Trace, read_trace


def add_trace(parser: argparse.ArgumentParser, *, option: bool = True) -> None:
    """Add the trace and the options that say what it leaves out."""
    text = "what the router chose: a file of --trace, MBLT v1 or route CSV"
    if option:
        parser.add_argument("--trace", required=True, metavar="FILE", help=text)
    else:
        parser.add_argument("trace", metavar="TRACE", help=text)
    parser.add_argument(
        "--model", help=f"the traced model, for its sizes: {GGUF_HELP}, {MODEL_HELP}"
    )
    parser.add_argument("--revision", help="revision of the hub repository")
    parser.add_argument(
        "--expert-bytes",
        type=size_of("--expert-bytes"),
        metavar="SIZE",
        help="bytes of one expert, instead",
    )
    parser.add_argument(
        "--pieces", type=int, metavar="N", help="places that one expert's bytes lie in (default: 3)"
    )
    parser.add_argument(
        "--decode-batch",
        type=int,
        default=1,
        metavar="N",
        help="sequences that were decoded at a time, for traces that name no phases",
    )


def open_trace(args: argparse.Namespace) -> tuple[Trace, Sizes | None]:
    """The trace with all sizes that are known, and the model's headers where one is given.

    Raises:
        TraceError: when it is damaged, or of another model than ``--model``.
        UsageError: for options without meaning.
    """
    for name in ("pieces", "decode_batch"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is at least 1", found=getattr(args, name))
    if args.pieces is not None and args.pieces > PIECES_MAX:
        raise UsageError(f"--pieces is at most {PIECES_MAX}", found=args.pieces)
    if args.expert_bytes is not None and args.expert_bytes > EXPERT_BYTES_MAX:
        raise UsageError(f"--expert-bytes is at most {EXPERT_BYTES_MAX}", found=args.expert_bytes)
    trace = read_trace(args.trace, decode_tokens=args.decode_batch)
    for note in trace.notes:
        print(f"mbolt-mlx: {args.trace}: {note}", file=sys.stderr)
    headers = None
    if args.model is not None:
        headers = open_headers(args.model, revision=args.revision)
        check_traced(trace, headers, args.trace)
        trace = with_infos(trace, headers.infos)
    changes = {"expert_bytes": args.expert_bytes, "pieces": args.pieces}
    changes = {key: value for key, value in changes.items() if value is not None}
    if changes:
        infos = {layer: replace(info, **changes) for layer, info in trace.layers.items()}
        trace = with_infos(trace, infos)
    return trace, headers


def check_traced(trace: Trace, headers: Sizes, path: str) -> None:
    """Refuse a trace, of the file ``path``, that is not of the model with ``headers``.

    The layers by which a GGUF model predicts further tokens need not be there: llama.cpp computes
    them only where it is asked to guess ahead.

    Raises:
        TraceError: naming the layer that differs or lacks.
    """
    shapes = headers.shapes
    ahead = _ahead(headers)
    trace.check_model(
        {n: s.experts for n, s in shapes.items()},
        path,
        top_k={n: s.top_k for n, s in shapes.items() if n not in ahead or n in trace.layers},
    )


def _ahead(headers: Sizes) -> range:
    """The last layers of a GGUF model, which predict further tokens; empty where it has none."""
    source = getattr(headers, "source", None)
    count, more = (
        source.get(key, 0) if source else 0 for key in ("block_count", "nextn_predict_layers")
    )
    if type(count) is not int or type(more) is not int or more <= 0:
        return range(0)
    return range(count - more, count)


def share(rate: float | None) -> str:
    """A hit rate in per cent; "-" where there was nothing to hit."""
    return "-" if rate is None else f"{rate:.1%}"


def with_infos(trace: Trace, infos: Mapping[int, LayerInfo]) -> Trace:
    """``trace`` with the sizes and pieces of ``infos``; its own experts and top_k stay."""
    layers = {
        layer: replace(info, expert_bytes=infos[layer].expert_bytes, pieces=infos[layer].pieces)
        for layer, info in trace.layers.items()
    }
    return Trace(trace.passes, layers, trace.model, trace.notes)
