"""How fast are the dataset read and a checkpoint written, on the paths of this run?"""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.config.run import RunConfig
from paceline.data.build import build_datasets
from paceline.data.example_files import RowRequest
from paceline.data.example_sets import build_row_datasets
from paceline.data.loader import Loader
from paceline.doctor.ceilings.amounts import Amounts
from paceline.doctor.ceilings.device import Rates, Skipped
from paceline.errors import ConfigError, DataError

_BLOCK = 4 * 2**20
_MICRO_STEPS = 2000
"""Most that are drawn from the loader."""
_PIECE = 2**16
"""About a sample of 8192 tokens with its neighbours; reads at random places."""


def storage_rates(config: RunConfig, rank: int, ranks: int, amounts: Amounts) -> tuple[Rates, Skipped]:
    """Rates of reading, writing and loading of one rank; all ranks do it at once, as in a run."""
    rates, skipped = Rates(), Skipped()
    path = _first_dataset(config)
    if path is None:
        skipped["storage_read"] = "data.train is synthetic, a plugin's or a folder: there is no one file to read."
    else:
        try:
            rates["storage_read"] = _read_in_order(path, rank, ranks, amounts)
            rates["storage_random"] = _read_anywhere(path, rank, amounts)
        except OSError as error:
            skipped["storage_read"] = f"{path}: {error.strerror}."
    try:
        rates["checkpoint_write"] = _write(_writable(Path(config.run.folder)), rank, amounts)
    except OSError as error:
        skipped["checkpoint_write"] = f"{config.run.folder}: {error.strerror or error}."
    try:
        rates["loader"] = _load(config, rank, ranks, amounts)
    except (ConfigError, DataError) as error:
        skipped["loader"] = f"{error.subject}."
    return rates, skipped


def _first_dataset(config: RunConfig) -> Path | None:
    train = config.data.train
    prefix = train if isinstance(train, str) else train[0].path
    if config.data.reads_rows(config.task.kind):
        file = Path(prefix.partition("#")[0])
        return file if file.is_file() else None
    return None if config.data.is_synthetic or ":" in prefix else Path(prefix + ".bin")


def _dropped(file: int) -> None:
    """Asks the system to forget what it holds of a file in memory, so that the disk is measured."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _read_in_order(path: Path, rank: int, ranks: int, amounts: Amounts) -> float:
    """GB/s; each rank begins at its own place."""
    file = os.open(path, os.O_RDONLY)
    try:
        _dropped(file)
        size = os.fstat(file).st_size
        offset = size // ranks * rank
        done, began = 0, time.perf_counter()
        while done < min(amounts.storage_bytes, size) and time.perf_counter() - began < amounts.storage_seconds:
            block = os.pread(file, _BLOCK, (offset + done) % max(1, size))
            if not block:
                break
            done += len(block)
        return done / max(1e-9, time.perf_counter() - began) / 1e9
    finally:
        os.close(file)


def _read_anywhere(path: Path, rank: int, amounts: Amounts) -> float:
    """GB/s of pieces at random places, one after another: what a single thread of the loader would get."""
    file = os.open(path, os.O_RDONLY)
    try:
        _dropped(file)
        size = os.fstat(file).st_size
        places = random.Random(rank)
        done, began = 0, time.perf_counter()
        while done < amounts.storage_bytes // 8 and time.perf_counter() - began < amounts.storage_seconds / 2:
            block = os.pread(file, _PIECE, places.randrange(max(1, size - _PIECE + 1)))
            if not block:
                break
            done += len(block)
        return done / max(1e-9, time.perf_counter() - began) / 1e9
    finally:
        os.close(file)


def _writable(folder: Path) -> Path:
    """The run folder, or the nearest folder above that is there."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())


def _write(folder: Path, rank: int, amounts: Amounts) -> float:
    """GB/s until the data is on the disk; the file is removed."""
    path = folder / f".paceline-doctor-{os.getpid()}-{rank}"
    block = os.urandom(_BLOCK)
    found = os.statvfs(folder)
    # never more than a tenth of what is free, all ranks of a node together being few
    most = min(amounts.storage_bytes, found.f_bavail * found.f_frsize // 80)
    done, began = 0, time.perf_counter()
    try:
        with path.open("wb", buffering=0) as file:
            while done < most and time.perf_counter() - began < amounts.storage_seconds:
                done += file.write(block)
            os.fsync(file.fileno())
            taken = time.perf_counter() - began
            # so that a memory of the file does not crowd out what is measured next
            _dropped(file.fileno())
    finally:
        path.unlink(missing_ok=True)
    return done / max(1e-9, taken) / 1e9


def _load(config: RunConfig, rank: int, ranks: int, amounts: Amounts) -> float:
    """Tokens/s of this rank's loader, as a run builds it, with data-parallel ranks as the recipe has them."""
    train = config.train
    dp = max(1, ranks // config.parallel.model_ranks)
    batch = train.micro_batch_size * dp
    most = _MICRO_STEPS
    with ExitStack() as stack:
        # indices of a run of another length would be left beside the dataset
        indices = stack.enter_context(TemporaryDirectory(prefix="paceline-doctor-"))
        data = config.data.model_copy(update={"valid": "", "test": "", "cache_dir": indices, "epochs": 0.0})
        samples = batch * (most + config.data.prefetch + 1)
        if data.reads_rows(config.task.kind):
            datasets = build_row_datasets(data, RowRequest.of(config), train_samples=samples)
        else:
            datasets = build_datasets(
                data,
                seq_len=train.seq_len,
                vocab_size=config.model.vocab_size,
                seed=config.run.seed,
                train_samples=samples,
            )
        loader = stack.enter_context(
            Loader(
                datasets.train,
                micro_batch_size=train.micro_batch_size,
                global_batch_size=batch,
                dp_rank=rank % dp,
                dp_size=dp,
                num_workers=config.data.num_workers,
                prefetch=config.data.prefetch,
            )
        )
        batches = iter(loader)
        for _ in range(config.data.prefetch + 1):
            next(batches)
        count, began = 0, time.perf_counter()
        while (taken := time.perf_counter() - began) < amounts.storage_seconds and count < most:
            next(batches)
            count += 1
    return count * train.micro_batch_size * train.seq_len / taken
