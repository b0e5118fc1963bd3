"""What the detector has found."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .clocks import Access, Frame


@dataclass(frozen=True)
class Fault:
    """Two accesses to the same bytes that nothing orders."""

    kind: str
    """"race": one of the two is a write; "use after free": the memory may be another tensor's by then."""
    first: Access
    second: Access

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for the same fault in another step."""
        return self.kind, self.first.what, self.first.stack[:2], self.second.what, self.second.stack[:2]

    def __str__(self) -> str:
        return f"{self.kind}:\n  {_indented(self.first)}\n  {_indented(self.second)}"


@dataclass(frozen=True)
class HostSync:
    """The host has waited for a device."""

    what: str
    stack: tuple[Frame, ...]

    @property
    def is_of_library(self) -> bool:
        """Whether the library made the host wait, and not PyTorch or the loop."""
        return any(path.startswith("overlap/") for path, _, _ in self.stack)

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"    {path}:{line} in {name}" for path, line, name in self.stack)])


@dataclass
class Report:
    """All faults and all synchronizations of the host, in order."""

    faults: list[Fault] = field(default_factory=list)
    host_syncs: list[HostSync] = field(default_factory=list)
    operators: int = 0
    """How many operators and collectives were checked."""

    def check(self) -> None:
        """Raise if there is a fault, or if the library makes the host wait.

        Raises:
            AssertionError: with each different fault once, both stacks included.
        """
        parts = [f"{count} times {fault}" for fault, count in _different(self.faults)]
        syncs = Counter(str(sync) for sync in self.host_syncs if sync.is_of_library)
        parts += [f"{count} times the host waits: {text}" for text, count in syncs.items()]
        assert not parts, "\n".join(parts)


def _different(faults: Iterable[Fault]) -> list[tuple[Fault, int]]:
    found: dict[tuple[object, ...], list[Fault]] = {}
    for fault in faults:
        found.setdefault(fault.place, []).append(fault)
    return [(same[0], len(same)) for same in found.values()]


def _indented(access: Access) -> str:
    return str(access).replace("\n", "\n  ")
