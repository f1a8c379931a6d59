"""The manifest: the file that makes a directory a checkpoint, with the size and the checksum of every other file.

A directory without it was never committed. On an object store, which has no rename, the files lie in a subdirectory
with the name of the attempt, and the manifest, written last, says which.
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.storage import REPLACED, FileFacts, Storage, StrPath, storage_of

FORMAT = "lightning_par-2"
MANIFEST = "MANIFEST.json"
METADATA = ".metadata"
META = "meta.pt"
Verify = Literal["none", "size", "checksum"]
_PIECE = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        time: When it was committed, in seconds since 1970.
        world_size: The number of ranks that saved it.
        data_ranks: The data rank of each rank; ranks with the same one have the same samples and random state.
        files: Every other file, by its path in the directory.
        attempt: Identifies the save.
        step: The number of optimizer steps taken, where that is known.
        layout: The sizes of the axes, where they are known.
        run: Identifies the run that saved it.
        incarnation: How often runs had been started in the directory of checkpoints (see `root.py`).
        data: The subdirectory of the files; empty where the directory got its name by a rename.
    """

    time: float
    world_size: int
    data_ranks: list[int]
    files: dict[str, FileFacts]
    attempt: str
    step: int | None = None
    layout: dict[str, int] | None = None
    run: str | None = None
    incarnation: int | None = None
    data: str = ""
    format: str = FORMAT

    @property
    def data_size(self) -> int:
        """The number of ranks with other samples."""
        return max(self.data_ranks) + 1

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(facts.bytes for facts in self.files.values())

    def to_json(self) -> str:
        content = asdict(self)
        content["files"] = {name: facts._asdict() for name, facts in sorted(self.files.items())}
        return json.dumps(content, indent=1)


def parse_manifest(text: str | bytes, where: str) -> Manifest:
    """Return the manifest with a content.

    Raises:
        CheckpointError: If it is not one, or of another version of the format.
    """
    try:
        content: dict[str, Any] = json.loads(text)
        found = content["format"]
        if found != FORMAT:
            raise CheckpointError(
                f"{where} has the format {found!r}, and this version of lightning_par reads {FORMAT!r}: load it with "
                "the version that wrote it"
            )
        files = {name: FileFacts(**facts) for name, facts in content.pop("files").items()}
        return Manifest(files=files, **content)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{where} cannot be read: {type(e).__name__}: {e}") from e


def read_manifest(path: StrPath) -> Manifest:
    """Read the manifest of a checkpoint directory.

    Raises:
        CheckpointError: If there is none, saying what the directory is instead.
    """
    storage, directory = storage_of(path)
    file = storage.join(directory, MANIFEST)
    if not storage.exists(file):
        raise CheckpointError(_what_it_is(storage, directory))
    with storage.open(file) as stream:
        return parse_manifest(stream.read(), file)


def is_sharded_checkpoint(path: StrPath) -> bool:
    """Tell whether `path` is a directory that holds a checkpoint, or what is left of one; does not read its content."""
    storage, directory = storage_of(path)
    names = storage.names(directory)
    return MANIFEST in names or META in names


def verify(path: StrPath, level: Verify = "size", *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Compare the files of a checkpoint with its manifest.

    Args:
        path: The directory.
        level: ``"size"`` compares sizes, ``"checksum"`` reads the files too; ``"none"`` looks for the manifest only.
        share: (i, n): take every n-th file, beginning with the i-th; n ranks together look at each file once.

    Returns:
        What is wrong; empty where nothing is.
    """
    storage, directory = storage_of(path)
    try:
        manifest = read_manifest(path)
    except (CheckpointError, OSError) as e:
        return [str(e)]
    if level == "none":
        return []
    required = [METADATA, META, *map(rank_file, range(manifest.world_size))]
    problems = [f"the manifest lacks {name}" for name in required if name not in manifest.files]
    for name, facts in sorted(manifest.files.items())[share[0] :: share[1]]:
        file = storage.join(data_directory(storage, directory, manifest), name)
        try:
            size = storage.size(file)
            if size != facts.bytes:
                problems.append(f"{name} has {size} bytes, not {facts.bytes}")
            elif level == "checksum" and checksum(storage, file) != facts.crc32:
                problems.append(f"the content of {name} was changed: its CRC-32 is not {facts.crc32}")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as e:
            problems.append(f"{name} cannot be read: {e}")
    return problems


def rank_file(rank: int) -> str:
    """The file of what a rank stores for itself."""
    return f"ranks/rank-{rank:05d}.pt"


def data_directory(storage: Storage, directory: str, manifest: Manifest) -> str:
    """The directory of the files."""
    return storage.join(directory, manifest.data) if manifest.data else directory


def checksum(storage: Storage, file: str) -> str:
    """CRC-32 of a file, as in the manifest."""
    crc = 0
    with storage.open(file) as stream:
        while piece := stream.read(_PIECE):
            crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"


def structural_problems(metadata: Metadata, files: Mapping[str, FileFacts]) -> list[str]:
    """What the index of the tensors promises and the files do not hold."""
    problems: list[str] = []
    stored = metadata.storage_data or {}
    for name, item in metadata.state_dict_metadata.items():
        chunks: Iterable[MetadataIndex] = (
            [MetadataIndex(name, chunk.offsets) for chunk in item.chunks]
            if isinstance(item, TensorStorageMetadata)
            else [MetadataIndex(name)]
        )
        for index in chunks:
            place = stored.get(index)
            if place is None:
                problems.append(f"no file has the part of {name} at {list(index.offset or ())}")
            elif place.relative_path not in files:
                problems.append(f"{place.relative_path}, which has a part of {name}, was not written")
            elif place.offset + place.length > files[place.relative_path].bytes:
                problems.append(f"{place.relative_path} ends before the part of {name} at {place.offset}")
    return problems


def read_metadata(storage: Storage, directory: str) -> Metadata:
    """Unpickle the index of the tensors."""
    with storage.open(storage.join(directory, METADATA)) as stream:
        metadata: Metadata = pickle.load(stream)
    return metadata


def _what_it_is(storage: Storage, directory: str) -> str:
    if not storage.exists(directory):
        base = directory.rsplit("/", 1)[-1]
        aside = [name for name in storage.names(storage.parent(directory)) if name.startswith(f"{REPLACED}{base}-")]
        hint = f"; a save that was to replace it was ended in the middle: it is {aside[0]} there" if aside else ""
        return f"there is no checkpoint {directory}{hint}"
    if not storage.is_directory(directory):
        return f"{directory} is a file, not a checkpoint directory"
    names = storage.names(directory)
    if META in names and any(name.endswith(".distcp") for name in names):
        return (
            f"{directory} has no {MANIFEST}: its save did not come to an end, or another program wrote it. A sharded "
            "checkpoint of Lightning's own strategies becomes a file, which every strategy loads, by `python -m "
            f"lightning.pytorch.utilities.consolidate_checkpoint {directory}`"
        )
    # Where `lightning-par fit` saves, in the directory of a run.
    hint = f"; those of this run are in {directory}/checkpoints" if "checkpoints" in names else ""
    return f"{directory} is not a checkpoint: it has no {MANIFEST}{hint}"
