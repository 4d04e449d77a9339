"""Which address and which interface of this node the job uses.

Never decides who the head is: nodes may share one address. Asks Slurm before the resolver, since compute nodes may have no
DNS and a node's own name often resolves to 127.0.1.1.
"""

import array
import fcntl
import socket
import struct
from dataclasses import dataclass

from miles_hpc.errors import Fault, PreflightError
from miles_hpc.process import run_short
from miles_hpc.slurm import NodeIdentity, ask_node_address

_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_UP_AND_RUNNING = 0x1 | 0x40
_RESOLVE_TIMEOUT_S = 5.0
# Never sent to: connecting a UDP socket only asks the kernel which source address it would use (RFC 5737, TEST-NET-3).
_ANYWHERE = "203.0.113.1"
# A list or an exclusion is a pattern for NCCL, not the name of one interface.
_PATTERN_MARKS = "^=,"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface that is up and has an IPv4 address."""

    name: str
    address: str


def list_interfaces() -> tuple[Interface, ...]:
    """Return the interfaces that are up and running, with their IPv4 address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(probe, _SIOCGIFFLAGS, request)
                flags = struct.unpack_from("H", request, 16)[0]
                fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                continue
            if flags & _IFF_UP_AND_RUNNING == _IFF_UP_AND_RUNNING:
                address = socket.inet_ntoa(request.tobytes()[20:24])
                found.append(Interface(name=name, address=address))
    return tuple(found)


def choose_interface(
    identity: NodeIdentity, wanted: str | None, head_host: str | None
) -> Interface:
    """Return the interface whose address this node announces to Ray and to collectives.

    Args:
        identity: this node, named in the error.
        wanted: the spec's interface; one concrete name decides, a pattern is for NCCL alone.
        head_host: address of the head, known to the other nodes; the kernel's route to it decides.

    Raises:
        PreflightError: if the named interface is not up, or no address can be told.
    """
    interfaces = list_interfaces()
    if wanted and not any(mark in wanted for mark in _PATTERN_MARKS):
        for interface in interfaces:
            if interface.name == wanted:
                return interface
        raise _no_interface(
            identity, f"no interface {wanted} that is up with an address", interfaces
        )
    usable = tuple(entry for entry in interfaces if not _is_excluded(entry.name, wanted))
    for address in _candidates(identity, head_host):
        for interface in usable:
            if interface.address == address:
                return interface
    outward = [entry for entry in usable if not entry.address.startswith("127.")]
    if len(outward) == 1:
        return outward[0]
    if not outward and len(identity.nodes) == 1 and interfaces:
        return interfaces[0]
    raise _no_interface(identity, "no address by which the other nodes reach this one", interfaces)


def _candidates(identity: NodeIdentity, head_host: str | None) -> tuple[str, ...]:
    if head_host is not None:
        return tuple(filter(None, (source_address(head_host),)))
    announced = ask_node_address(identity.node) if identity.cluster == "slurm" else None
    resolved = resolve(announced) if announced else ()
    # 127.0.1.1 is what Debian's /etc/hosts says of the host itself; it reaches nobody.
    usable = tuple(address for address in resolved if not address.startswith("127."))
    routed = tuple(filter(None, (source_address(_ANYWHERE),)))
    return usable + routed + resolved + (("127.0.0.1",) if identity.cluster == "local" else ())


def source_address(target: str) -> str | None:
    """Return the address from which the kernel would send to `target`, or None when it has no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def resolve(host: str) -> tuple[str, ...]:
    """Return the IPv4 addresses of `host`; a resolver that does not answer is none."""
    try:
        return (socket.inet_ntoa(socket.inet_aton(host)),)
    except OSError:
        # In a child, because the resolver of this process could not be interrupted.
        done = run_short(("getent", "ahostsv4", host), timeout_s=_RESOLVE_TIMEOUT_S)
    addresses = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    return tuple(dict.fromkeys(addresses))


def free_port(address: str) -> int:
    """Return a port that was free on `address` a moment ago; a caller must be ready to take another."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def is_reachable(host: str, port: int, timeout_s: float) -> bool:
    """Say whether something accepts connections at host:port."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def _is_excluded(name: str, pattern: str | None) -> bool:
    """Apply NCCL's exclusion form `^prefix,prefix` to one interface name."""
    if pattern is None or not pattern.startswith("^"):
        return False
    exact = pattern[1:].startswith("=")
    names = pattern[1:].removeprefix("=").split(",")
    return any(name == entry if exact else name.startswith(entry) for entry in names if entry)


def _no_interface(
    identity: NodeIdentity, found: str, interfaces: tuple[Interface, ...]
) -> PreflightError:
    listed = ", ".join(f"{entry.name} {entry.address}" for entry in interfaces) or "none"
    return PreflightError(
        str(
            Fault(
                where=f"{identity.node}: network",
                found=f"{found} (up: {listed})",
                expected="one interface that every node of the job reaches",
                fix='Set network.interface in the spec or the site profile, such as "eth0".',
            )
        )
    )
