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
    counts = torch.tensor([piece.count for piece in pieces])
    firsts = (counts.cumsum(0) - counts).tolist()
    slots = torch.cat([torch.arange(piece.slot, piece.slot + piece.count) for piece in pieces])
    sequences, starts = (
        torch.tensor(values).repeat_interleave(counts)
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
    # what kernels read comes first, at multiples of 16 bytes: Triton compiles another kernel for others
    parts = (_int64(blocks), _int64(end_blocks), places, slots - starts, _int64(ends))
    tables = torch.cat(parts).int().to(device).split([len(part) for part in parts])
    return Rows(tables[0].view(-1, 4), tables[1].view(-1, 4), tables[2].view(-1, 2), tables[3], tables[4])


def _int64(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
