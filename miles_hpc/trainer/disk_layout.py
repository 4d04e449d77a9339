"""How a set of byte spans becomes one stream of equal, aligned blocks in a file, and which piece of a span stands where.

Pure arithmetic: knows no tensor, no file and no device. Spans are packed without gaps, so thousands of small ones cost
no more than their bytes; only the last block is padded.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

ALIGNMENT_BYTES = 4096
"""Alignment of memory, file offset and length of every request: what direct I/O wants on any common file system (the
largest of the logical block sizes 512 and 4096, and the page size of x86-64)."""


def round_up(num_bytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Return the smallest multiple of `alignment` that is not below `num_bytes`."""
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes that is contiguous both in one span and in one block."""

    span: int
    span_offset_bytes: int
    block_offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """Where each span's bytes stand in the file.

    Attributes:
        span_bytes: size of each span in order; zero is allowed.
        block_bytes: size of one request, a multiple of `ALIGNMENT_BYTES`.
    """

    span_bytes: tuple[int, ...]
    block_bytes: int
    starts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.block_bytes <= 0 or self.block_bytes % ALIGNMENT_BYTES:
            raise ValueError(
                f"a block of {self.block_bytes} bytes; expected a positive multiple of {ALIGNMENT_BYTES}"
            )
        object.__setattr__(self, "starts", tuple(accumulate(self.span_bytes, initial=0)))

    @classmethod
    def of(cls, span_bytes: Sequence[int], block_bytes: int) -> "StreamLayout":
        """Lay `span_bytes` out in their order."""
        return cls(tuple(span_bytes), block_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all spans together."""
        return self.starts[-1]

    @property
    def file_bytes(self) -> int:
        """Bytes the file must have: the total with its last block padded to the alignment."""
        return round_up(self.total_bytes)

    @property
    def num_blocks(self) -> int:
        """Blocks of the stream; the last may be short."""
        return -(-self.total_bytes // self.block_bytes)

    def payload_bytes(self, block: int) -> int:
        """Return the bytes of block number `block` that belong to spans."""
        return min(self.block_bytes, self.total_bytes - block * self.block_bytes)

    def pieces(self, block: int) -> Iterator[Piece]:
        """Yield the pieces of block number `block` in the order of their bytes."""
        position = block * self.block_bytes
        end = position + self.payload_bytes(block)
        span = bisect_right(self.starts, position) - 1
        while position < end:
            span_end = self.starts[span + 1]
            num_bytes = min(span_end, end) - position
            if num_bytes:
                yield Piece(
                    span,
                    position - self.starts[span],
                    position - block * self.block_bytes,
                    num_bytes,
                )
            position += num_bytes
            span += 1
