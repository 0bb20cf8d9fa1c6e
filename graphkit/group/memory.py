"""Memory: amounts as users write and read them, what a group takes, and what a device says when it has none left."""

from __future__ import annotations

import re
from decimal import Decimal

import attrs

from graphkit.dims import as_size
from graphkit.errors import MemoryBudgetError, SpecError

_UNITS = {
    "B": 1,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip

_AMOUNT = re.compile(rf"(\d{{1,18}}(?:\.\d{{1,18}})?) ?({'|'.join(_UNITS)})", re.ASCII)

# torch's own words for what was asked for, and for what there was. A cap of the process is told apart from the device.
_WANTED = re.compile(r"Tried to allocate ([\d.]+) (B|bytes|KiB|MiB|GiB)")
_FREE = re.compile(r"of which ([\d.]+) (B|bytes|KiB|MiB|GiB) is free")


def parse_bytes(value: object, what: str) -> int:
    """Bytes, from an int or from text as "2GiB", "512MiB" or "1.5GB".

    Args:
        what: begins messages.

    Raises:
        SpecError: it is neither, or less than a byte.
    """
    if not isinstance(value, str):
        return as_size(value, what, minimum=1, error=SpecError)
    match = _AMOUNT.fullmatch(value)
    if match is None:
        raise SpecError(
            f"{what} must be bytes as an int, or text as '2GiB', '512MiB' or '1.5GB', got {value!r}; the units are "
            f"{', '.join(_UNITS)}"
        )
    nbytes = int(Decimal(match[1]) * _UNITS[match[2]])
    return as_size(nbytes, what, minimum=1, error=SpecError)


def bytes_text(count: int) -> str:
    """An amount for readers."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


@attrs.frozen(kw_only=True)
class MemoryUse:
    """What a group takes on its device, in bytes.

    Attributes:
        buffers: static buffers at their maxima, adopted memory aside.
        staging: the spans that host inputs arrive in.
        outputs: static outputs.
        pool: what the graphs' pools hold, shared by the graphs of each.
        driver: what the driver took while graphs were captured: their executables, and whatever else took memory
            on the device outside torch's allocator meanwhile.
    """

    buffers: int
    staging: int
    outputs: int
    pool: int
    driver: int

    @property
    def static(self) -> int:
        """What is taken whatever is captured."""
        return self.buffers + self.staging + self.outputs

    @property
    def total(self) -> int:
        """All of it."""
        return self.static + self.pool + self.driver


def out_of_memory(error: BaseException, where: str, free: int | None) -> MemoryBudgetError:
    """The error to raise for a bucket that the device had no memory for.

    Args:
        error: torch's, or one that quotes it.
        where: names the bucket.
        free: bytes that are free now, if the device can say; used where `error` doesn't.
    """
    text = str(error)
    wanted = _found(_WANTED, text)
    told = _found(_FREE, text)
    free = free if told is None else told
    parts = []
    if wanted is not None:
        parts.append(f"{bytes_text(wanted)} were wanted")
    if free is not None:
        parts.append(f"{bytes_text(free)} were free on the device")
    figures = f" ({', '.join(parts)})" if parts else ""
    first = (text.strip().splitlines() or [type(error).__name__])[0]
    made = MemoryBudgetError(
        f"{where}: the device's memory is too small{figures}. Lower the top of the ladder, leave more memory free "
        f"(a smaller cache, another group's release()), or make the group with on_error='skip' or memory_budget=, so "
        f"that what doesn't fit falls back: {first}",
        wanted=wanted,
        free=free,
    )
    made.__cause__ = error.__cause__ if isinstance(error, MemoryBudgetError) else error
    return made


def _found(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None:
        return None
    unit = "B" if match[2] == "bytes" else match[2]
    return int(Decimal(match[1].rstrip(".")) * _UNITS[unit])
