"""What one start leaves for the next: JAX's compilation cache, and XLA's autotuning results beside it.

Two processes may share a folder. An entry that cannot be read is compiled anew, with one warning for all of them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax

from .log import log

_ZSTANDARD = b"\x28\xb5\x2f\xfd"  # JAX compresses by it where it is installed, else by zlib
_LARGEST_PROGRAM = 1 << 32
_UNREADABLE = "persistent compilation cache"  # in what JAX warns of, one warning an entry


def use_compilation_cache(folder: str | None) -> str | None:
    """Point JAX's persistent compilation cache at `folder` (None: the user's cache folder, "": no cache); a cache that the
    process has configured already is left alone. Returns the folder in use."""
    path = cache_folder(folder)
    if path is not None and not _configured():
        jax.config.update("jax_compilation_cache_dir", path)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if path is None and folder is None:
        log.warning("no compilation cache: there is no home folder; name one with compilation_cache_dir")
    return path


def cache_folder(folder: str | None) -> str | None:
    """The folder that `use_compilation_cache` takes, without taking it."""
    return None if folder == "" else _configured() or folder or _default_cache()


def _configured() -> str | None:
    return getattr(jax.config, "jax_compilation_cache_dir", None)


def _default_cache() -> str | None:
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user id that nobody has, as in containers
        return None
    return str(root / "lora_jax" / "xla")


def autotune_folder(cache: str, device_kind: str) -> str | None:
    """Where XLA keeps what it measured, made if need be: results of another XLA or card are no use. None: nowhere."""
    folder = Path(cache) / "autotune" / f"jaxlib-{importlib.metadata.version('jaxlib')}" / device_kind.replace(" ", "_")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        log.warning("autotuning results are not kept: %s cannot be made (%s)", folder, e.strerror)
        return None
    return str(folder)


@contextlib.contextmanager
def one_warning() -> Iterator[None]:
    """Around all that compiles at start: JAX's warnings about single cache entries become one line of the log, others pass."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            ours = [w for w in caught if _UNREADABLE in str(w.message)]
            others = [w for w in caught if w not in ours]
    if ours:
        log.warning(
            "%d entries of the compilation cache in %s could not be used and were compiled anew; the first: %s",
            len(ours),
            _configured(),
            str(ours[0].message).splitlines()[0],
        )
        _remove_damaged(_configured())
    for w in others:
        warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)


def _remove_damaged(folder: str | None) -> None:
    """JAX never writes over an entry that exists: one that was cut short, by a kill or a full disk, would stay for ever."""
    for path in Path(folder).glob("*-cache") if folder else ():
        with contextlib.suppress(OSError):
            if not _whole(path.read_bytes()):
                path.unlink(missing_ok=True)


def _whole(entry: bytes) -> bool:
    """Whether it can be decompressed, as far as can be told."""
    if not entry.startswith(_ZSTANDARD):
        decompressor = zlib.decompressobj()
        try:
            decompressor.decompress(entry)
        except zlib.error:
            return False
        return decompressor.eof
    try:
        zstandard = importlib.import_module("zstandard")
    except ModuleNotFoundError:
        return True
    try:
        zstandard.ZstdDecompressor().decompress(entry, max_output_size=_LARGEST_PROGRAM)
    except zstandard.ZstdError:
        return False
    return True
