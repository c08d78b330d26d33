"""Numbers and tables for people: units, and the inspection of a model as text."""

from __future__ import annotations

from conjoin.report.inspection import Inspection

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def format_bytes(count: float) -> str:
    """Bytes in binary units.

    >>> format_bytes(3 * 2**20), format_bytes(12)
    ('3.0 MiB', '12 B')
    """
    for unit in _BINARY:
        if abs(count) < 1024 or unit == _BINARY[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def format_count(count: float) -> str:
    """A count in decimal units.

    >>> format_count(6_738_415_616), format_count(0)
    ('6.74 G', '0')
    """
    for unit in _DECIMAL:
        if abs(count) < 1000 or unit == _DECIMAL[-1]:
            return f"{count:.0f}" if unit == "" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError


def inspection_table(found: Inspection) -> list[tuple[str, str, str, str, str]]:
    """One row an operator: name, calls, flops, bytes moved, how its output may lie."""
    rows = []
    for op in found.operators:
        splits = " ".join(op.splits) or ("opaque: replicated" if op.opaque else "–")
        splits += " +" if op.expandable else ""
        rows.append((op.op, str(op.count), format_count(op.flops), format_bytes(op.bytes), splits))
    return rows


def inspection_summary(found: Inspection) -> list[tuple[str, str]]:
    """The totals, a line each."""
    frozen = found.num_parameters - found.num_trainable
    parameters = f"{found.num_parameters:,} ({format_bytes(found.parameter_bytes)})"
    work = format_count(found.forward_flops)
    kept, peak = format_bytes(found.activation_bytes), format_bytes(found.peak_bytes)
    return [
        ("mode", "train" if found.training else "eval"),
        ("operators", f"{found.num_nodes} calls of {len(found.operators)} kinds, {len(found.opaque)} opaque"),
        ("parameters", parameters + (f", {frozen:,} frozen" if frozen else "")),
        ("buffers", format_bytes(found.buffer_bytes)),
        ("inputs", format_bytes(found.input_bytes)),
        ("forward", f"{work}flop" if " " in work else f"{work} flop"),
        ("activations", f"{kept} kept for backward, {peak} if none is kept"),
        ("fingerprint", found.fingerprint[:16]),
    ]
