"""What is and is not the pinned NCCL, judged from what a probe found."""

from pathlib import Path

import pytest

from miles_hpc.handoff import DeniedNccl, NcclPin
from miles_hpc.node.nccl import NcclFound, describe_code, judge_nccl

PIN = NcclPin(path=None, version_code=23007, preload=True)


def found(code: int | None, error: str = "") -> NcclFound:
    return NcclFound(path=Path("/x/libnccl.so.2"), version_code=code, error=error)


def test_the_pinned_version_is_fit():
    assert judge_nccl(PIN, found(23007), "n1") == ()


@pytest.mark.parametrize(("code", "name"), [(22809, "2.28.9"), (23107, "2.31.7"), (2708, "2.7.8")])
def test_another_version_is_named_with_both(code, name):
    (fault,) = judge_nccl(PIN, found(code), "n1")
    assert name in fault.found
    assert "2.30.7" in fault.expected
    assert fault.where == "n1: NCCL"


def test_a_library_that_does_not_open_says_why():
    (fault,) = judge_nccl(PIN, found(None, "wrong ELF class"), "n1")
    assert "wrong ELF class" in fault.found
    assert "/x/libnccl.so.2" in fault.found


@pytest.mark.parametrize("code", [22803, 22808])
def test_a_denied_version_is_refused_even_when_asked_for(code):
    denied = (DeniedNccl(first_code=22803, last_code=22808, why="it hangs"),)
    pin = NcclPin(path=None, version_code=code, preload=True, denied=denied)
    (fault,) = judge_nccl(pin, found(code), "n1")
    assert "it hangs" in fault.found


def test_codes_are_read_as_nccl_writes_them():
    assert describe_code(23007) == "23007 (2.30.7)"
    assert describe_code(21805) == "21805 (2.18.5)"
    assert describe_code(2708) == "2708 (2.7.8)"
