"""Measured tiles in a file in the compile cache's folder: `lora-jax bench kernels --autotune` writes it, an engine reads it at
start.

One file holds tables of several cards and versions; a reader takes the one that was measured on its kind of card with its jax and
its kernels, and of that what the kernels take today. The file is data: nothing in it is run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

import lora_jax.kernels
from lora_jax.kernels.candidates import from_data, to_data
from lora_jax.kernels.tuned import TileTable, tiles_in_use

from .device import DeviceSetup
from .log import log

FILE = "tiles.json"
LARGEST = 16 << 20  # bytes: a table of one model has some 20 KB


def tiles_file(cache: str | None) -> Path | None:
    """In the folder of the compile cache; None where there is none or JAX was told not to use it."""
    if not cache or not getattr(jax.config, "jax_enable_compilation_cache", True):
        return None
    return Path(cache) / FILE


def stored_tiles(cache: str | None, setup: DeviceSetup) -> TileTable:
    """What a start with this cache and device uses, and one line of the log that says so. Empty where kernels are not in use."""
    path = tiles_file(cache)
    if setup.implementation != "triton" or path is None:
        return TileTable()
    table = read_tiles(path, table_name(setup.device))
    if table.entries:
        log.info("tiles: a measured table is in use, %d entries of %s", len(table.entries), path)
    else:
        log.info(
            "tiles: from shapes alone (no measured ones for this card and version in use; see lora-jax bench kernels --autotune)"
        )
    return table


def table_name(device: Any) -> str:
    """What measured times depend on: the kind of card, jax, and the kernels' sources."""
    return f"{device.device_kind}, jax {jax.__version__}, kernels {_kernels_hash()}"


@functools.cache
def _kernels_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(lora_jax.kernels.__path__[0]).glob("*.py")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def read_tiles(path: Path, name: str) -> TileTable:
    """The sound entries of one table; what is damaged is left out, with one warning."""
    try:
        tables = _tables(path)
    except (OSError, ValueError, RecursionError) as e:
        log.warning("tiles: %s cannot be read and is not used: %s", path, e)
        return TileTable()
    table, unsound = from_data(tables.get(name, []))
    if unsound:
        log.warning("tiles: %d entries of %s are not what these kernels take and are not used", unsound, path)
    return table


def _tables(path: Path) -> dict[str, Any]:
    """Name -> entries, unchecked; {} without a file. Raises: OSError, ValueError."""
    if not path.exists():
        return {}
    if not path.is_file():  # a pipe would be waited for
        raise ValueError("it is no file")
    with path.open("rb") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"larger than {LARGEST} bytes")
    found = json.loads(text)
    tables = found.get("tables") if isinstance(found, dict) else None
    if not isinstance(tables, dict):
        raise ValueError("it holds no tables")
    return tables


def write_tiles(path: Path, name: str, table: TileTable, measured: set[Any]) -> TileTable:
    """Puts a table in the file and returns all of it that is there now: entries of keys that were not measured stay, as do other
    tables. A reader sees the old file or the new one. Raises: OSError."""
    check_tiles_file(path)
    path = path.resolve()  # of a link, what it points to
    with _locked(path.parent):  # another writer's entries are not lost
        try:
            tables = _tables(path)
        except (ValueError, RecursionError):  # damaged: replaced
            tables = {}
        kept = {key: tiles for key, tiles in from_data(tables.get(name, []))[0].entries if key not in measured}
        table = TileTable.of({**kept, **table.by_key})
        text = json.dumps({"tables": {**tables, name: to_data(table)}}, indent=1) + "\n"
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(text)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return table


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone among those who lock the folder, which leaves nothing in it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def check_tiles_file(path: Path) -> None:
    """Makes its folder. Raises: OSError if the file could not be written there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is there and no file", str(path))
    if not os.access(path.resolve().parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path.parent))


def traced_with(fn: Callable[..., Any], table: TileTable) -> Callable[..., Any]:
    """fn, which takes its tiles from the table whenever and wherever it is traced."""

    @functools.wraps(fn)
    def traced(*args: Any) -> Any:
        with tiles_in_use(table):
            return fn(*args)

    return traced
