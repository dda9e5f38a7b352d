"""Check the network interfaces and host names with which a training's ranks connect to each other."""

import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llava_fsdp.doctor.findings import Finding, fail, ok, warn
from llava_fsdp.runtime.process.host import read_kernel_file

CHOICES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Interface:
    name: str
    address: str | None
    up: bool
    megabits: int | None
    """Megabits per second; None: unknown."""

    def __str__(self) -> str:
        return f"{self.name} {self.address}" + (f" ({self.megabits / 1000:.3g} Gb/s)" if self.megabits else "")


def read_interfaces() -> list[Interface]:
    """Return this machine's network interfaces, read from /sys/class/net."""
    interfaces, root = [], Path("/sys/class/net")
    for _, name in socket.if_nameindex():
        speed = read_kernel_file(root / name / "speed")
        megabits = int(speed) if speed and speed.isdecimal() else None
        up = read_kernel_file(root / name / "operstate") in ("up", "unknown")
        interfaces.append(Interface(name, address_of(name), up, megabits))
    return interfaces


def address_of(name: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none. torch's stores and gloo prefer IPv4."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def read_infiniband() -> dict[str, str]:
    """Return the state of each InfiniBand port, such as `4: ACTIVE`, by `card:port`."""
    try:
        ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    except OSError:
        return {}
    return {f"{port.parents[1].name}:{port.name}": read_kernel_file(port / "state") or "unknown" for port in ports}


def lookup(host: str) -> str | None:
    """Return the IPv4 address of a host name; None if it has none."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def judge_interfaces(
    interfaces: Sequence[Interface], ports: Mapping[str, str], environment: Mapping[str, str], nodes: int
) -> Iterator[Finding]:
    """Check the network interfaces and the InfiniBand ports (state by `card:port`). Those that NCCL_SOCKET_IFNAME and
    GLOO_SOCKET_IFNAME name must exist. `nodes`: number of machines of the training."""
    useful = [each for each in interfaces if each.up and each.address is not None and each.name != "lo"]
    names = {each.name for each in interfaces}
    for variable in CHOICES:
        chosen = environment.get(variable, "")
        for name in filter(None, map(str.strip, chosen.lstrip("^=").split(","))):
            # gloo takes whole names; NCCL their beginnings, whole ones after `=`, and after `^` those not to be used
            is_exact = chosen.startswith("=") or variable == CHOICES[1]
            exists = name in names if is_exact else any(each.startswith(name) for each in names)
            if not exists and not chosen.startswith("^"):
                cure = f"unset {variable}, or name one of {', '.join(sorted(names))}"
                yield fail("interfaces", f"{variable}={chosen}, but there is no {name}", cure)
                return
    described = ", ".join(map(str, useful))
    if nodes > 1 and not useful:
        yield fail("interfaces", "none with an address except loopback", "let the container have the host's network")
        return
    yield ok("interfaces", described or "only loopback, which is enough for one machine")
    if ports:
        down = [name for name, state in ports.items() if "ACTIVE" not in state]
        if down:
            cure = f"ibstat; NCCL_IB_HCA names those that work, and without it NCCL may try {down[0]}"
            yield warn("InfiniBand", ", ".join(f"{name} {state}" for name, state in ports.items()), cure)
        else:
            yield ok("InfiniBand", f"{len(ports)} ports, all active")


def judge_name(host: str, address: str | None, nodes: int) -> Iterator[Finding]:
    """Check that this machine's host name has an IPv4 address that other machines can reach; gloo looks it up."""
    if address is None:
        cure = f"add a line to /etc/hosts: ADDRESS {host}; or GLOO_SOCKET_IFNAME=eth0"
        make = fail if nodes > 1 else warn
        yield make("host name", f"{host} has no address", cure)
    elif nodes > 1 and address.startswith("127."):
        cure = f"let /etc/hosts give {host} its address on the network; or GLOO_SOCKET_IFNAME=eth0"
        yield fail("host name", f"{host} is {address}, but the other machines must connect to it", cure)
    else:
        yield ok("host name", f"{host}, {address}")
