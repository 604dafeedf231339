"""The tokens of prompts as rows of one matrix: whose they are, where they go, in passes of bounded size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """``count`` successive tokens of one sequence, the first of them at ``slot`` of its cache row.

    ``start`` is the slot that the sequence's text begins at. ``wanted``: the logits behind the last token are
    asked for.
    """

    sequence: int
    slot: int
    count: int
    start: int = 0
    wanted: bool = True

    def split(self, count: int) -> tuple["Piece", "Piece"]:
        """The first ``count`` tokens, and the rest."""
        rest = Piece(self.sequence, self.slot + count, self.count - count, self.start, self.wanted)
        return Piece(self.sequence, self.slot, count, self.start, False), rest


@dataclass(frozen=True)
class Rows:
    """What the kernels need to know of a pass, on the device.

    blocks int32 [n, 4]: first row, sequence, slot and rows of each run of one sequence. places int32 [N, 2]:
    sequence and slot of each row. positions int32 [N]: its place in its text. ends int32 [W]: rows whose
    logits are wanted; end_blocks: their blocks when they are all the rows that there are.
    """

    blocks: Tensor
    end_blocks: Tensor
    places: Tensor
    positions: Tensor
    ends: Tensor


def passes(pieces: Sequence[Piece], most: int) -> Iterator[list[Piece]]:
    """The pieces in their order, ``most`` tokens at a time; long ones are split."""
    batch: list[Piece] = []
    room = most
    for piece in pieces:
        while piece.count > room:
            if room:
                head, piece = piece.split(room)
                batch.append(head)
            yield batch
            batch, room = [], most
        batch.append(piece)
        room -= piece.count
    if batch:
        yield batch


def rows_of(pieces: Sequence[Piece], block_rows: int, device: torch.device) -> Rows:
    """The tables of one pass; one copy to the device."""
    parts = _parts(pieces, block_rows)
    return _tables(torch.cat(parts).int().to(device), [len(part) for part in parts])


class FixedRows:
    """Tables of ``count`` rows of up to ``sequences`` pieces that stay where they are, for any rows below.

    Surplus rows stand at sequence -1, in no block; surplus blocks have no rows, surplus ends are row 0.
    """

    def __init__(self, count: int, sequences: int, block_rows: int, device: torch.device):
        self.count, self.sequences, self._block_rows = count, sequences, block_rows
        # every piece but one may begin another block
        blocks = (count - 1) // block_rows + sequences
        self._sizes = [4 * blocks, 4 * sequences, 2 * count, count, sequences]
        self._empty = torch.zeros(sum(self._sizes), dtype=torch.int32, device="cpu")
        self._empty.split(self._sizes)[2].fill_(-1)
        self._memory = self._empty.to(device, copy=True)
        self.tables = _tables(self._memory, self._sizes)

    def fill(self, pieces: Sequence[Piece]) -> int:
        """Takes over up to ``sequences`` pieces of up to ``count`` rows; returns how many rows are wanted."""
        memory = self._empty.clone()
        parts = _parts(pieces, self._block_rows)
        for part, target in zip(parts, memory.split(self._sizes), strict=True):
            target[: len(part)] = part
        # read before it returns: the memory is not pinned
        self._memory.copy_(memory, non_blocking=True)
        return len(parts[-1])


def _parts(pieces: Sequence[Piece], block_rows: int) -> list[Tensor]:
    """blocks, end_blocks, places, positions and ends of Rows, flat int64 on the host."""
    counts = _int64([piece.count for piece in pieces])
    firsts = (counts.cumsum(0) - counts).tolist()
    slots = torch.cat([torch.arange(piece.slot, piece.slot + piece.count, device="cpu") for piece in pieces])
    sequences, starts = (
        _int64(values).repeat_interleave(counts)
        for values in ([piece.sequence for piece in pieces], [piece.start for piece in pieces])
    )
    blocks: list[int] = []
    ends: list[int] = []
    end_blocks: list[int] = []
    for piece, first in zip(pieces, firsts, strict=True):
        for offset in range(0, piece.count, block_rows):
            count = min(block_rows, piece.count - offset)
            blocks += [first + offset, piece.sequence, piece.slot + offset, count]
        if piece.wanted:
            end_blocks += [len(ends), piece.sequence, piece.slot + piece.count - 1, 1]
            ends.append(first + piece.count - 1)
    places = torch.stack((sequences, slots), 1).view(-1)
    return [_int64(blocks), _int64(end_blocks), places, slots - starts, _int64(ends)]


def _tables(memory: Tensor, sizes: Sequence[int]) -> Rows:
    """Views of ``memory``. What kernels read comes first, at multiples of 16 bytes: Triton compiles another
    kernel for others."""
    blocks, end_blocks, places, positions, ends = memory.split(list(sizes))
    return Rows(blocks.view(-1, 4), end_blocks.view(-1, 4), places.view(-1, 2), positions, ends)


def _int64(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
