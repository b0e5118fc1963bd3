"""Tensors in a folder of ``torch.distributed.checkpoint``, cut into boxes, of which one at a time is in memory.

Private: ``_StorageInfo`` and the prefix of a plan, which ``FileSystemWriter`` itself uses. PyTorch's own ``write_data``
keeps the last copied part of every tensor until all are written.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

# A box is a part of this of a tensor, within these limits; while it is written, memory rises by three boxes.
_BOXES = 64
_BOX_BYTES = (4 * 2**20, 64 * 2**20)

_Box = tuple[tuple[int, ...], tuple[int, ...], int]


def boxes(shape: Sequence[int], start: int, end: int, limit: int) -> Iterator[_Box]:
    """The boxes that cover the elements from ``start`` to ``end`` of a contiguous tensor: their offsets, sizes and
    first elements. None has more than ``limit`` elements; apart from that they are at most ``2 * len(shape) - 1``.

    >>> list(boxes((4, 3), 2, 10, 100))
    [((0, 2), (1, 1), 2), ((1, 0), (2, 3), 3), ((3, 0), (1, 1), 9)]
    """
    if not shape and start < end:
        yield (), (), start
        return
    row = math.prod(shape[1:])
    while start < end:
        index, within = divmod(start, row)
        if within or end - start < row or row > limit:
            stop = min(end, start - within + row)
            for offsets, sizes, first in boxes(shape[1:], within, within + stop - start, limit):
                yield (index, *offsets), (1, *sizes), start - within + first
        else:
            count = min((end - start) // row, max(1, limit // row))
            stop = start + count * row
            yield (index, *[0] * (len(shape) - 1)), (count, *shape[1:]), start
        start = stop


class Flat(Protocol):
    """A flat tensor, or one whose slices are made when they are asked for."""

    @property
    def dtype(self) -> torch.dtype: ...

    def numel(self) -> int: ...

    def __getitem__(self, elements: slice, /) -> Tensor: ...


@dataclass(frozen=True)
class Boxes:
    """A tensor of which this rank has some boxes, to write them, or to read into them."""

    shape: torch.Size
    dtype: torch.dtype
    parts: Mapping[torch.Size, tuple[torch.Size, Callable[[], Tensor]]]
    """By offsets: the sizes of a box, and a function that makes its tensor, when it is asked for."""

    @classmethod
    def whole(cls, tensor: Tensor, *, is_read: bool = False) -> Boxes:
        """All of ``tensor``; to be read into where ``is_read``, in one piece."""
        dense = tensor.detach()
        if not torch.ops.aten.is_non_overlapping_and_dense(dense):
            dense = dense.contiguous()
        flat = dense.as_strided((dense.numel(),), (1,), int(dense.storage_offset()))
        return cls.chunk(flat, dense.shape, dense.stride(), 0, is_read=is_read)

    @classmethod
    def chunk(
        cls, flat: Flat, shape: Sequence[int], strides: Sequence[int], start: int, *, is_read: bool = False
    ) -> Boxes:
        """The elements from ``start`` on, in the order of the memory, of a dense tensor with these ``strides``; to be
        read into where ``is_read``, in few pieces."""
        # The dimensions from the slowest to the fastest one, and where each of the tensor's own is among them.
        order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim]))
        place, whole = [order.index(dim) for dim in range(len(shape))], torch.Size(shape)

        def part(first: int, sizes: Sequence[int]) -> Tensor:
            return flat[first - start : first - start + math.prod(sizes)].view(sizes).permute(place)

        least, most = (size // flat.dtype.itemsize for size in _BOX_BYTES)
        limit = max(1, whole.numel()) if is_read else min(most, max(least, whole.numel() // _BOXES))
        parts: dict[torch.Size, tuple[torch.Size, Callable[[], Tensor]]] = {
            torch.Size(o[dim] for dim in place): (torch.Size(z[dim] for dim in place), partial(part, first, z))
            for o, z, first in boxes([shape[dim] for dim in order], start, start + flat.numel(), limit)
        }
        if not parts and not whole.numel():  # A box without elements says that there is such a tensor.
            parts = {torch.Size([0] * len(whole)): (whole, lambda: torch.empty(whole, dtype=flat.dtype, device="cpu"))}
        return cls(whole, flat.dtype, parts)

    def share(self, name: str, rank: int, ranks: int) -> Boxes:
        """Those boxes of a tensor that all ranks have which this one writes, so that none plans the boxes of others."""
        first = zlib.crc32(name.encode())
        parts = {key: part for number, (key, part) in enumerate(self.parts.items()) if (first + number) % ranks == rank}
        return replace(self, parts=parts)

    # As torch.distributed.checkpoint asks.

    def size(self) -> torch.Size:
        return self.shape

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, self.shape),
            )
            for offsets, (sizes, _) in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, sizes) for offsets, (sizes, _) in self.parts.items()]


def _looked_up(state_dict: Mapping[str, Any], index: Any) -> Any:
    found = state_dict[index.fqn]
    return found.parts[index.offset][1]() if isinstance(found, Boxes) else found


class SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return _looked_up(self.state_dict, index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return cast(Tensor, _looked_up(self.state_dict, index))

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _Writer(FileSystemWriter):
    """Keeps one box in memory."""

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        name, results = f"{plan.storage_data.prefix}0.distcp", []
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            for item in plan.items:
                data, start = planner.resolve_data(item), stream.tell()
                if item.type == WriteItemType.BYTE_IO:
                    stream.write(data.getbuffer())
                else:
                    data = data.detach().cpu().contiguous()
                    is_view = data.untyped_storage().nbytes() != data.nbytes
                    torch.save(data.clone() if is_view else data, cast(Any, stream))
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            if self.sync_files:
                stream.flush()
                os.fsync(stream.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def write(items: Mapping[str, Any], folder: str, group: dist.ProcessGroup) -> None:
    """Save ``items``, :class:`Boxes` and other values that are pickled, of all ranks of ``group``; of boxes and values
    that several ranks have, one rank's.

    Raises:
        CheckpointException: a rank could not write.
    """
    planner = SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp_save(dict(items), storage_writer=_Writer(folder), planner=planner, process_group=group)


class Folder:
    """A folder that :func:`write` or PyTorch itself has written, read by this rank alone.

    Raises:
        FileNotFoundError: there is none, or its writing has not ended.
    """

    def __init__(self, folder: str) -> None:
        self._path = folder
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.found: dict[str, Any] = self._metadata.state_dict_metadata
        """Its entries, by name."""

    def is_pickled(self, name: str) -> bool:
        """Whether it is not a tensor."""
        return isinstance(self.found[name], BytesStorageMetadata)

    def read(self, name: str, boxes: Boxes | None = None) -> Any:
        """Read an entry, or of a tensor these ``boxes``, into which its elements go.

        Raises:
            ValueError: bytes are not those that were written.
        """
        found, value = self.found[name], None
        if boxes is None and not self.is_pickled(name):
            value = torch.empty(found.size, dtype=found.properties.dtype, device="cpu")
            boxes = Boxes.whole(value, is_read=True)
        given: dict[str, Any] = {name: boxes}
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(given, self._metadata, is_coordinator=True)
        plan = planner.create_local_plan()
        self._check_sums({item.storage_index: None for item in plan.items})
        self._reader.read_data(plan, planner).wait()
        return given[name] if value is None else value

    def _check_sums(self, places: Iterable[Any]) -> None:
        """Compare the checksums of archives, which ``torch.load`` does not; one that was saved without
        (``torch.serialization.set_crc32_options``) has zeros in their place."""
        for place in places:
            at = self._reader.storage_data[place]
            with (Path(self._path) / at.relative_path).open("rb") as file:
                file.seek(at.offset)
                archive = io.BytesIO(file.read(at.length))
            if not zipfile.is_zipfile(archive):
                continue
            records = zipfile.ZipFile(archive)
            if any(record.CRC for record in records.infolist()) and (wrong := records.testzip()) is not None:
                raise ValueError(f"the checksum of {wrong} in {at.relative_path} is wrong")
