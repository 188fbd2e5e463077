"""Check every byte and every value of a cache: `python -m data.verify <cache folder, or a folder of caches>`.

Bytes: size and checksum of each shard against the ledger. Values: columns as the manifest says, ids in range, offsets
ascending, numbers finite, probabilities that sum to one. Exit code 0: sound; 1: what is wrong, a line each.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.cache import DTYPE_NAMES, MANIFEST, Manifest, ShardRecord, shard_name
from data.cache_plan import human, shard_layout
from data.cache_writer import file_checksum
from data.progress import ProgressBar
from data.reader import MappedShard
from models.errors import UserError

CHUNK_TOKENS = 16_384
MASS_ERROR = 0.02  # of the head and tail's sum: 64 log-probabilities in fp16 are each good to 1e-3 or better


def verify_cache(folder: str | Path) -> list[str]:
    """What is wrong with a cache, one line each; empty when all is sound. Raises UserError where there is no cache."""
    manifest = Manifest.open(Path(folder))
    problems = [f"{folder}: {shard_name(i)}: {what}" for i, what in manifest.damaged_shards().items()]
    if not manifest.is_complete:
        done = len(manifest.shards)
        problems.append(f"{folder}: unfinished, {done} of {manifest.num_shards} shards; train.cache continues it")
    sound = {i: record for i, record in manifest.shards.items() if i not in manifest.damaged_shards()}
    total = sum(record.bytes for record in sound.values())
    with ProgressBar(f"verifying {manifest.folder.name}", total, "bytes") as bar:
        for index, record in sound.items():
            problems += [f"{folder}: {shard_name(index)}: {what}" for what in _shard_problems(manifest, index, record)]
            bar.advance(record.bytes)
    for key in ("rows", "tokens"):
        counted = sum(getattr(record, key) for record in manifest.shards.values())
        if manifest.is_complete and counted != manifest.content[f"num_{key}"]:
            problems.append(f"{folder}: the shards hold {counted} {key}, the manifest says otherwise")
    return problems


def _shard_problems(manifest: Manifest, index: int, record: ShardRecord) -> Iterator[str]:
    path = manifest.folder / shard_name(index)
    if (found := file_checksum(path)) != record.checksum:
        yield f"checksum {found} instead of {record.checksum}: bytes changed; delete the file, train.cache rebuilds it"
        return
    shard = MappedShard(path, record.bytes)
    layout = shard_layout(manifest.columns, tokens=record.tokens, rows=record.rows)
    shapes = {name: array.shape for name, array in shard.arrays.items()}
    dtypes = {name: DTYPE_NAMES[dtype] for name, dtype in layout.dtypes.items()}
    if shapes != layout.shapes or shard.dtypes != dtypes:
        yield "columns differ from the manifest"
        return
    offsets = shard.arrays["row_offsets"]
    if offsets[0] != 0 or offsets[-1] != record.tokens or (np.diff(offsets) <= 0).any():
        yield "row_offsets do not ascend from 0 to the number of tokens"
    vocab_size = manifest.content["target"]["vocab_size"]
    seen: set[str] = set()
    for start in range(0, record.tokens, CHUNK_TOKENS):
        chunk = {
            name: _tensor(array[start : start + CHUNK_TOKENS], shard.dtypes[name])
            for name, array in shard.arrays.items()
            if not name.startswith("row_")
        }
        for problem in _value_problems(chunk, vocab_size):
            if problem not in seen:
                seen.add(problem)
                yield f"{problem} (first in tokens {start} to {min(start + CHUNK_TOKENS, record.tokens)})"


def _value_problems(columns: dict[str, Tensor], vocab_size: int) -> Iterator[str]:
    for name in ("input_ids", "topk_ids"):
        if name in columns and not bool(((columns[name] >= 0) & (columns[name] < vocab_size)).all()):
            yield f"{name}: ids outside 0 to {vocab_size - 1}"
    if bool((columns["loss_mask"] > 1).any()):
        yield "loss_mask: values other than 0 and 1"
    for name, values in columns.items():
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            yield f"{name}: values that are not finite"
    if "topk_ids" in columns:
        ids = columns["topk_ids"].sort(dim=1).values  # (c, k)
        if bool((ids[:, 1:] == ids[:, :-1]).any()):
            yield "topk_ids: an id twice for one token"
        logprobs = columns["topk_logprobs"].float()  # (c, k)
        if bool((logprobs > 0).any()) or bool((logprobs[:, 1:] > logprobs[:, :-1]).any()):
            yield "topk_logprobs: above 0 or not descending"
        mass = logprobs.exp().sum(1) + columns["tail_logprob"].exp()  # (c,)
        if not bool(((mass - 1).abs() < MASS_ERROR).all()):
            yield "topk_logprobs, tail_logprob: probabilities that do not sum to one"


def _tensor(array: np.ndarray, dtype: str) -> Tensor:
    tensor = torch.from_numpy(array.copy())  # the map is read-only
    return tensor.view(torch.bfloat16) if dtype == "BF16" else tensor


def find_caches(path: Path) -> list[Path]:
    """The folder itself if it is a cache, else the caches in it."""
    if (path / MANIFEST).is_file():
        return [path]
    folders = sorted(manifest.parent for manifest in path.glob(f"*/{MANIFEST}"))
    if not folders:
        raise UserError(f"{path}: no cache there; give the folder that train.cache printed, or the one that holds it")
    return folders


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data.verify", description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="a cache, or a folder of caches")
    path = parser.parse_args(arguments).path
    num_problems = 0
    try:
        for folder in find_caches(path):
            problems = verify_cache(folder)
            content = Manifest.open(folder).content
            for problem in problems:
                print(f"error: {problem}", file=sys.stderr)
            if not problems:
                size = sum(record["bytes"] for record in content["shards"].values())
                print(f"{folder}: sound, {content['num_tokens']:,} tokens, {human(size)}")
            num_problems += len(problems)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
