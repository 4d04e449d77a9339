"""How much memory this job may use on this node, and how much of it is left: by the tightest of its cgroups (v1 or v2) and the machine.

Reads files under two roots, so that tests can give it fixed trees. Knows nothing of what the memory is for.
"""

from collections.abc import Iterator
from pathlib import Path

# cgroup v1 says "no limit" with a number near 2**63.
_UNLIMITED_V1 = 1 << 60
_LIMITS = {1: "memory.limit_in_bytes", 2: "memory.max"}
_USAGES = {1: "memory.usage_in_bytes", 2: "memory.current"}


def memory_limit_bytes(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> tuple[int, str]:
    """Return the bytes this process may use, and where that was read.

    A limit may stand at any level above the process's own cgroup, and a step's own cgroup often has none.

    Source: "memory.max" in the kernel's cgroup v2 guide, "memory.limit_in_bytes" in that of v1.
    """
    best, where = _machine_bytes(proc, "MemTotal"), "MemTotal of the machine"
    for folder, version in memory_cgroups(proc, cgroups):
        name = folder / _LIMITS[version]
        limit = _read_limit(name)
        if limit is not None and limit < best:
            best, where = limit, str(name)
    return best, where


def memory_left_bytes(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> tuple[int, str]:
    """Return the bytes this process and its children may still take, and where that was read.

    At each level: the limit less what is held, without what the kernel gives back before it kills anything: the pages of
    files (not those of tmpfs, which are on its lists of anonymous memory) and, where the cgroup knows them, the slabs of their inodes.

    Source: "memory.stat" in the kernel's guides to cgroup v2 and v1; MemAvailable in proc(5).
    """
    best, where = _machine_bytes(proc, "MemAvailable"), "MemAvailable of the machine"
    for folder, version in memory_cgroups(proc, cgroups):
        limit = _read_limit(folder / _LIMITS[version])
        held = _read_limit(folder / _USAGES[version])
        if limit is None or held is None:
            continue
        left = max(0, limit - max(0, held - _reclaimable_bytes(folder, version)))
        if left < best:
            best, where = left, str(folder)
    return best, where


def _reclaimable_bytes(folder: Path, version: int) -> int:
    # In v1 the plain figures leave out the groups below, which the usage counts.
    prefix = "total_" if version == 1 else ""
    names = {f"{prefix}active_file", f"{prefix}inactive_file", "slab_reclaimable"}
    found = (line.split() for line in _lines(folder / "memory.stat"))
    return sum(int(words[1]) for words in found if len(words) == 2 and words[0] in names)


def memory_cgroups(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[Path, int]]:
    """Yield (folder, version) of each memory cgroup that holds this process, from its own one upwards."""
    for line in _lines(proc / "self" / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from ((folder, 2) for folder in _upwards(_v2_root(cgroups), path))
        elif "memory" in controllers.split(","):
            yield from ((folder, 1) for folder in _upwards(cgroups / "memory", path))


def _v2_root(cgroups: Path) -> Path:
    """Return where v2 is mounted: alone, or beside v1 in `unified`."""
    return cgroups if (cgroups / "cgroup.controllers").exists() else cgroups / "unified"


def _upwards(root: Path, path: str) -> list[Path]:
    folder = root / path.lstrip("/")
    folders = [folder, *folder.parents]
    return [entry for entry in folders if entry == root or root in entry.parents]


def _read_limit(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    if not text.isdecimal() or int(text) >= _UNLIMITED_V1:
        return None
    return int(text)


def _machine_bytes(proc: Path, name: str) -> int:
    for line in _lines(proc / "meminfo"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED_V1


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
