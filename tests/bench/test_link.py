"""The shaped network: it has the speed it says, and nothing of it outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlap.bench import link
from overlap.bench.link import LinkError, ShapedLink, missing_requirement, parse_bandwidth, remove_leftovers

needs_root = pytest.mark.skipif(missing_requirement() is not None, reason=str(missing_requirement()))

_STREAM = """
import socket, sys, time
if sys.argv[1] == "0":
    connection, _ = socket.create_server(("0.0.0.0", 5000)).accept()
    while connection.recv(1 << 20):
        pass
else:
    for _ in range(200):
        try:
            connection = socket.create_connection(("198.18.0.1", 5000))
            break
        except OSError:
            time.sleep(0.02)
    size = int(sys.argv[2])
    start = time.perf_counter()
    connection.sendall(bytes(size))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # the other side closes when it has everything
    print(size / (time.perf_counter() - start))
"""

_HOLD = """
import sys, time
from overlap.bench.link import ShapedLink
with ShapedLink(ranks=2, bandwidth_bytes_per_s=1e6) as link:
    print(link.namespace(0), flush=True)
    time.sleep(60)
"""


def namespaces_of(pid: int) -> list[str]:
    folder = Path("/run/netns")
    return (
        [path.name for path in folder.iterdir() if path.name.startswith(f"overlap-{pid}-")] if folder.is_dir() else []
    )


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("1gbit", 125e6), ("100mbit", 12.5e6), ("10Gbit", 1.25e9), ("2.5 gbit/s", 312.5e6), ("800kbit", 1e5), ("8bit", 1)],
)
def test_bandwidths_are_read_as_tc_reads_them(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "fast", "1", "1gb", "-1gbit", "0mbit", "1gbyte"])
def test_what_is_not_a_bandwidth_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"bandwidth=.*100mbit"):
        parse_bandwidth(text)


def test_without_root_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LinkError, match=r"^cannot shape a link: network namespaces need root$"):
        ShapedLink(ranks=2, bandwidth_bytes_per_s=1e6).__enter__()


def test_without_ip_the_reason_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(link, "_find", lambda _: None)
    assert missing_requirement() == "`ip` is not installed (package iproute2)"


@needs_root
def test_a_stream_runs_at_the_speed_of_the_link() -> None:
    with ShapedLink(ranks=2, bandwidth_bytes_per_s=parse_bandwidth("100mbit")) as network:
        speeds: list[float] = []
        # A busy machine delays a stream, so the fastest of a few counts for the lower bound.
        while not speeds or (max(speeds) <= 0.8 * 12.5e6 and len(speeds) < 5):
            speeds.append(_stream(network, size=5_000_000))
    # Below by what headers take; none above but for the bucket of one millisecond.
    assert 0.8 * 12.5e6 < max(speeds) < 1.01 * 12.5e6


def _stream(network: ShapedLink, *, size: int) -> float:
    """Bytes per second of one stream from rank 1 to rank 0."""
    command = [sys.executable, "-c", _STREAM]
    server = subprocess.Popen([*network.prefix(0), *command, "0"])
    client = [*network.prefix(1), *command, "1", str(size)]
    speed = float(subprocess.run(client, check=True, capture_output=True, timeout=30).stdout)
    assert server.wait(10) == 0
    return speed


@needs_root
def test_everything_is_gone_after_the_context() -> None:
    with ShapedLink(ranks=3, bandwidth_bytes_per_s=1e6):
        assert len(namespaces_of(os.getpid())) == 4  # three ranks and the bridge
    assert namespaces_of(os.getpid()) == []


@needs_root
def test_everything_is_gone_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), ShapedLink(ranks=2, bandwidth_bytes_per_s=1e6):
        _ = 1 / 0
    assert namespaces_of(os.getpid()) == []


@needs_root
def test_processes_left_in_a_namespace_go_with_it() -> None:
    with ShapedLink(ranks=2, bandwidth_bytes_per_s=1e6) as network:
        left = subprocess.Popen([*network.prefix(1), "sleep", "60"])
        while not link._pids_in(network.namespace(1)):
            time.sleep(0.01)
    assert left.wait(5) == -signal.SIGKILL
    assert namespaces_of(os.getpid()) == []


@needs_root
def test_a_network_that_cannot_be_finished_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise LinkError("no tbf here")

    monkeypatch.setattr(ShapedLink, "_shape", fail)
    with pytest.raises(LinkError, match="no tbf here"):
        ShapedLink(ranks=2, bandwidth_bytes_per_s=1e6).__enter__()
    assert namespaces_of(os.getpid()) == []


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process that holds a network open."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("overlap-")
    yield process
    process.kill()
    process.communicate()


@needs_root
def test_a_request_to_end_cleans_up(holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGTERM)
    holder.wait(10)
    assert namespaces_of(holder.pid) == []


@needs_root
def test_what_a_killed_process_left_is_removed_by_the_next(holder: subprocess.Popen[str]) -> None:
    assert len(namespaces_of(holder.pid)) == 3
    assert not any(f"-{holder.pid}-" in name for name in remove_leftovers())  # it lives
    holder.kill()
    holder.wait(10)
    with ShapedLink(ranks=2, bandwidth_bytes_per_s=1e6):
        assert namespaces_of(holder.pid) == []
