"""Links of known speed between processes of one machine: network namespaces, a bridge, and a token bucket each way.

A process enters a namespace of its own, which has no name (:func:`open_bridge`, :func:`join_bridge`). So it is gone,
with the devices in it, when its processes are, however they end: nothing has to be removed.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from overlap.errors import ConfigurationError

INTERFACE = "eth0"
# Addresses that RFC 2544 reserves for benchmarks.
SUBNET = "198.18.0"
BRIDGE_ADDRESS = f"{SUBNET}.254"
# A frame of 1500 bytes would give 4.5 % of the speed to headers; with jumbo frames it is 0.7 %.
MTU = "9000"
CLONE_NEWNET = 0x40000000
# The bucket holds a millisecond: it refills from a timer, and a smaller one lets a fast link run slow, while a
# larger one lets more through for free after each pause. At least two frames have to fit.
_BURST_S, _MIN_BURST_BYTES = 0.001, 2 * int(MTU)
_QUEUE_BYTES = 8 * 1024 * 1024
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
# Below /proc/sys/net: no IPv6 traffic to be counted, and a sender that neither probes nor forgets the link's speed.
SETTINGS = {
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    # BBR, the default on some machines, stalls for 200 ms every ten seconds to probe the round trip. Reno is the one
    # that every kernel allows in a namespace.
    "ipv4/tcp_congestion_control": "reno",
    # On a busy machine acknowledgements come late, and data would be sent, and counted, twice.
    "ipv4/tcp_early_retrans": "0",
}


def parse_bandwidth(text: str) -> float:
    """Bytes per second that ``text`` stands for, written as for ``tc``: a number of bits with a unit.

    >>> parse_bandwidth("1gbit"), parse_bandwidth("100mbit"), parse_bandwidth("2.5gbit")
    (125000000.0, 12500000.0, 312500000.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)bit(?:/s|ps)?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ConfigurationError(f"bandwidth={text!r} is not a speed: write for example 1gbit, 100mbit or 2.5gbit")
    return float(match[1]) * _UNITS[match[2]] / 8


def missing_requirement() -> str | None:
    """The reason in one line why this machine cannot make the network, or ``None``."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}.items():
        if _find(tool) is None:
            return f"`{tool}` is not installed (package {package})"
    return None


def run_tool(*words: str) -> str:
    """The output of a command. Raises: ConfigurationError: it failed."""
    # A session of its own: Ctrl-C at the terminal must not kill a command that is cleaning up.
    command = [_find(words[0]) or words[0], *words[1:]]
    done = subprocess.run(command, check=False, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise ConfigurationError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def token_bucket(bytes_per_s: float) -> list[str]:
    """The words of ``tc qdisc add`` that limit what a device sends."""
    burst_bytes = max(_MIN_BURST_BYTES, int(bytes_per_s * _BURST_S))
    rate, burst, limit = f"{int(bytes_per_s * 8)}bit", str(burst_bytes), str(_QUEUE_BYTES)
    return ["root", "tbf", "rate", rate, "burst", burst, "limit", limit]


def open_bridge() -> None:
    """Move this thread, and the processes that it starts, into a new namespace with a bridge."""
    _enter_new_namespace()
    for words in (
        f"link add bridge mtu {MTU} type bridge forward_delay 0",
        f"address add {BRIDGE_ADDRESS}/24 dev bridge",
        "link set bridge up",
    ):
        run_tool("ip", *words.split())


def join_bridge(pid: int, number: int, *, bytes_per_s: float) -> None:
    """Move this thread into a new namespace with one link, to the bridge of the process ``pid``."""
    _enter_new_namespace()
    at_the_bridge = ("nsenter", f"--net=/proc/{pid}/ns/net")
    port = f"port{number}"
    peer = f"peer name {INTERFACE} mtu {MTU} netns {os.getpid()}"
    run_tool(*at_the_bridge, "ip", *f"link add {port} mtu {MTU} type veth {peer}".split())
    run_tool(*at_the_bridge, "ip", *f"link set {port} master bridge up".split())
    run_tool(*at_the_bridge, "tc", "qdisc", "add", "dev", port, *token_bucket(bytes_per_s))
    run_tool("tc", "qdisc", "add", "dev", INTERFACE, *token_bucket(bytes_per_s))
    run_tool("ip", *f"address add {SUBNET}.{number + 1}/24 dev {INTERFACE}".split())
    run_tool("ip", *f"link set {INTERFACE} up".split())


def _enter_new_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigurationError(f"cannot make a network namespace ({reason}): leave the speed of the link out")
    run_tool("ip", "link", "set", "lo", "up")
    for key, value in SETTINGS.items():
        with suppress(OSError):  # Where /proc cannot be written to, or the kernel lacks a setting.
            Path("/proc/sys/net", key).write_text(value)


def _find(tool: str) -> str | None:
    return shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin:/usr/bin")
