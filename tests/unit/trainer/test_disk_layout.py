"""The stream of blocks holds every byte of every span exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.trainer.disk_layout import ALIGNMENT_BYTES, StreamLayout


@given(
    sizes=st.lists(st.integers(0, 30_000), max_size=12),
    pages=st.integers(1, 4),
)
def test_every_byte_of_every_span_stands_in_exactly_one_place(sizes, pages):
    layout = StreamLayout.of(sizes, pages * ALIGNMENT_BYTES)
    covered = [0] * len(sizes)
    position = 0
    for block in range(layout.num_blocks):
        for piece in layout.pieces(block):
            assert piece.num_bytes > 0
            assert block * layout.block_bytes + piece.block_offset_bytes == position
            assert piece.span_offset_bytes == covered[piece.span]
            assert piece.block_offset_bytes + piece.num_bytes <= layout.payload_bytes(block)
            covered[piece.span] += piece.num_bytes
            position += piece.num_bytes
    assert covered == sizes
    assert position == layout.total_bytes
    assert layout.file_bytes % ALIGNMENT_BYTES == 0
    assert 0 <= layout.file_bytes - layout.total_bytes < ALIGNMENT_BYTES


def test_a_block_that_direct_io_would_refuse_is_refused():
    with pytest.raises(ValueError, match="multiple of 4096"):
        StreamLayout.of([1], 1000)
