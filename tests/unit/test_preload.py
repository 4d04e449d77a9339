"""The order of LD_PRELOAD, and what of a shell's it keeps."""

from miles_hpc.preload import merge_preload, site_preload, split_preload

SAVER = "/x/torch_memory_saver_hook_mode_preload.abi3.so"
NCCL = "/pin/libnccl.so.2"


def test_the_order_is_memory_saver_nccl_site():
    site = "/opt/xalt/libxalt_init.so:/usr/lib/libjemalloc.so.2"
    assert merge_preload(memory_saver=SAVER, nccl=NCCL, site=site) == f"{SAVER}:{NCCL}:{site}"
    assert merge_preload(memory_saver=None, nccl=NCCL, site="") == NCCL
    assert merge_preload(memory_saver=None, nccl=None, site=site) == site


def test_blanks_and_empty_entries_separate_as_for_ld_so():
    assert split_preload(" /a.so  /b.so::/c.so:") == ("/a.so", "/b.so", "/c.so")


def test_another_nccl_or_memory_saver_of_the_shell_is_not_the_sites():
    value = f"/old/libnccl.so.2.28.9 /x/libxalt.so {SAVER} /nccl/libother.so"
    assert site_preload(value) == "/x/libxalt.so:/nccl/libother.so"


def test_a_library_stands_there_once():
    assert merge_preload(memory_saver=None, nccl=NCCL, site="/a.so:/a.so") == f"{NCCL}:/a.so"
