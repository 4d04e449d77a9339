"""Which address and which interface of this node the job uses.

Never decides who the head is: nodes may share one address. Asks Slurm before the resolver, since compute nodes may have no
DNS and a node's own name often resolves to 127.0.1.1. Whether the other nodes reach the address is proved by `node.reach`.
"""

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.errors import Fault, PreflightError
from miles_hpc.node.rendezvous import HeadAddress
from miles_hpc.process import run_short
from miles_hpc.slurm import NodeIdentity, ask_node_address

_SIOCGIFCONF = 0x8912
_SIOCGIFFLAGS = 0x8913
_IFF_UP_AND_RUNNING = 0x1 | 0x40
# struct ifreq on a 64-bit kernel: a name of 16 bytes, then a struct sockaddr_in whose address starts at byte 4.
_IFREQ_BYTES = 40
_MOST_ADDRESSES = 1024
_RESOLVE_TIMEOUT_S = 5.0
# Never sent to: connecting a UDP socket only asks the kernel which source address it would use (RFC 5737, TEST-NET-3).
_ANYWHERE = "203.0.113.1"
_EXPECTED = "one interface that every node of the job reaches"
_FIX = 'Set network.interface in the spec or the site profile: a name ("ib0"), a pattern ("^lo,docker") or a subnet ("10.1.0.0/16").'


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface with an IPv4 address; one with several addresses stands there once for each."""

    name: str
    address: str
    is_up: bool = True

    @property
    def is_loopback(self) -> bool:
        """Reaches this host alone."""
        return self.address.startswith("127.")


def list_interfaces() -> tuple[Interface, ...]:
    """Return the interfaces that have an IPv4 address, also those that are down.

    Source: netdevice(7), SIOCGIFCONF and SIOCGIFFLAGS.
    """
    buffer = bytearray(_IFREQ_BYTES * _MOST_ADDRESSES)
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # The kernel fills the buffer that the structure points at.
        pointed = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        request = struct.pack("iP", len(buffer), ctypes.addressof(pointed))
        filled = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
        for start in range(0, filled, _IFREQ_BYTES):
            entry = bytes(buffer[start : start + _IFREQ_BYTES])
            name = entry[:16].partition(b"\0")[0]
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("40s", name))
            except OSError:  # gone since the list was made
                continue
            flags = struct.unpack_from("H", answer, 16)[0]
            found.append(
                Interface(
                    name=os.fsdecode(name),
                    address=socket.inet_ntoa(entry[20:24]),
                    is_up=flags & _IFF_UP_AND_RUNNING == _IFF_UP_AND_RUNNING,
                )
            )
    return tuple(found)


def select_interfaces(
    wanted: str | None, interfaces: tuple[Interface, ...]
) -> tuple[Interface, ...]:
    """Return those of `interfaces` that the spec's network.interface admits, in its order.

    A name admits that very interface, a list every name that starts with one of its entries, `=` before either asks for
    whole names, `^` excludes (NCCL's forms), and a subnet admits the addresses in it. None admits all.
    """
    if wanted is None:
        return interfaces
    if "/" in wanted:
        subnet = ipaddress.ip_network(wanted, strict=False)
        return tuple(entry for entry in interfaces if ipaddress.ip_address(entry.address) in subnet)
    is_excluding = wanted.startswith("^")
    pattern = wanted.removeprefix("^")
    # One bare name means itself: "eth1" must not admit eth10.
    is_whole = pattern.startswith("=") or not (is_excluding or "," in pattern)
    entries = [entry for entry in pattern.removeprefix("=").split(",") if entry]

    def matches(name: str, entry: str) -> bool:
        return name == entry if is_whole else name.startswith(entry)

    if is_excluding:
        return tuple(i for i in interfaces if not any(matches(i.name, entry) for entry in entries))
    ordered = (i for entry in entries for i in interfaces if matches(i.name, entry))
    return tuple(dict.fromkeys(ordered))


def choose_interface(
    identity: NodeIdentity, wanted: str | None, head: HeadAddress | None
) -> Interface:
    """Return the interface whose address this node announces to Ray and to collectives.

    Of those that `wanted` admits, the kernel's way to the head decides; on the head, the order of a list, else what Slurm says
    of this node, then the way to the world outside. Loopback serves only where the spec names it or nothing else is there, and
    never between hosts.

    Args:
        identity: this node, named in the error.
        wanted: the spec's network.interface.
        head: what the head has published; None on the head itself.

    Raises:
        PreflightError: if no interface fits, with what this node has.
    """
    interfaces = list_interfaces()
    up = tuple(entry for entry in interfaces if entry.is_up)
    admitted = select_interfaces(wanted, up)
    if not admitted:
        found = "no interface that is up" if wanted is None else f"nothing that {wanted} admits"
        raise _no_interface(identity, found, interfaces)
    # Who excludes or lists does not ask for loopback; who names it does.
    is_named = wanted is not None and not wanted.startswith("^")
    outward = tuple(entry for entry in admitted if not entry.is_loopback)
    usable = admitted if is_named or not outward else outward
    # On the head the order of the key stands. Slurm and the resolver are not asked where there is nothing to choose.
    is_open = len(usable) > 1 and not (is_named and head is None)
    addresses = _candidates(identity, head) if is_open else ()
    chosen = _prefer(identity, usable, addresses, is_ordered=is_named)
    if chosen is None:
        raise _no_interface(
            identity, "several interfaces and nothing that speaks for one of them", interfaces
        )
    if head is not None and chosen.is_loopback and head.host_identity != host_identity():
        raise _no_interface(
            identity,
            f"only {chosen.name} {chosen.address}, which does not reach {head.node} on another host",
            interfaces,
        )
    if head is not None and head.host.startswith("127.") and head.host_identity != host_identity():
        raise _no_interface(
            identity,
            f"{head.node} on another host announces {head.host}, which is this host itself",
            interfaces,
        )
    return chosen


def _prefer(
    identity: NodeIdentity,
    usable: tuple[Interface, ...],
    addresses: tuple[str, ...],
    *,
    is_ordered: bool,
) -> Interface | None:
    for address in addresses:
        for interface in usable:
            if interface.address == address:
                return interface
    names = {interface.name for interface in usable}
    is_plain = is_ordered or len(names) == 1 or len(identity.nodes) == 1
    return usable[0] if is_plain else None


def _candidates(identity: NodeIdentity, head: HeadAddress | None) -> tuple[str, ...]:
    if head is not None:
        return tuple(filter(None, (source_address(head.host),)))
    announced = ask_node_address(identity.node) if identity.cluster == "slurm" else None
    resolved = resolve(announced) if announced else ()
    return (*resolved, *filter(None, (source_address(_ANYWHERE),)))


def nccl_interface(wanted: str, chosen: Interface) -> str:
    """Return what NCCL_SOCKET_IFNAME says for the spec's `wanted`: NCCL's own forms as they are, else one whole name."""
    is_form_of_nccl = "/" not in wanted and (wanted.startswith(("^", "=")) or "," in wanted)
    return wanted if is_form_of_nccl else f"={chosen.name}"


def host_identity() -> str:
    """Return what two processes have in common exactly if they share one loopback: the boot and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


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


def _no_interface(
    identity: NodeIdentity, found: str, interfaces: tuple[Interface, ...]
) -> PreflightError:
    return PreflightError(
        str(
            Fault(
                where=f"{identity.node}: network",
                found=f"{found} (this node has {describe_interfaces(interfaces)})",
                expected=_EXPECTED,
                fix=_FIX,
            )
        )
    )


def describe_interfaces(interfaces: tuple[Interface, ...]) -> str:
    """Return one line that lists `interfaces`, or says that there are none."""
    listed = (
        f"{entry.name} {entry.address}{'' if entry.is_up else ' (down)'}" for entry in interfaces
    )
    return ", ".join(listed) or "no interface with an IPv4 address"
