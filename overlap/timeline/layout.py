"""Where everything goes in a picture: bars in lanes, three lanes for each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from overlap.errors import ConfigurationError
from overlap.timeline.report import Report
from overlap.timeline.spans import Interval, intersection, lanes, without
from overlap.timeline.steps import Activity, StepReport

__all__ = ["LANE", "Bar", "Lane", "Panel", "panel_of"]

LANE = 1.0
_GAP, _RANK_GAP = 0.18, 0.55
_MOST_RANKS = 8
# Shorter ones, as a share of the step, are narrower than a pixel.
_LEAST_SHARE = 0.0008
_MEANING_OF_PHASE = {
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "finalization": "DDP copies gradients",
    "optimizer": "optimizer.step(), update",
}
_MEANING_OF_CODE = {"update": "optimizer.step(), update", "reduce": "code of the reducer"}
_WITHOUT_A_WORD = ("finalization",)


@dataclass(frozen=True)
class Bar:
    """A rectangle: from left to right in ms, from top to bottom in lanes' heights; ``meaning`` finds its color."""

    interval: Interval
    top: float
    height: float
    meaning: str
    text: str = ""


@dataclass(frozen=True)
class Lane:
    """A row of bars."""

    label: str
    top: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Panel:
    """One step of a report, times counted from the first rank's start."""

    title: str
    steps: tuple[StepReport, ...]
    """One for each rank that is shown."""
    lanes: tuple[Lane, ...]
    """Three for each of ``steps``."""

    @property
    def height(self) -> float:
        return self.lanes[-1].top + LANE

    @property
    def end_ms(self) -> float:
        ends = [lane_bar.interval.end_ms for lane in self.lanes for lane_bar in lane.bars]
        return max([*ends, *(self.shift_ms(step) + step.step_ms for step in self.steps)])

    def shift_ms(self, step: StepReport) -> float:
        """How much later than the first rank this one started."""
        return step.start_ms - min(other.start_ms for other in self.steps)


def panel_of(title: str, report: Report, number: int | None) -> Panel:
    """One step of ``report``: ``number``, or the one that took rank 0 the median time.

    Raises:
        ConfigurationError: there is none.
    """
    chosen = report.median_step() if number is None else number
    steps = () if chosen is None else report.of_step(chosen)[:_MOST_RANKS]
    if not steps:
        recorded = f"0 to {len(report.ranks[0]) - 1}" if report.ranks[0] else "none"
        raise ConfigurationError(f"step is {number}, and the steps that were recorded ({title}) are: {recorded}")
    panel = Panel(title, steps, ())
    return replace(panel, lanes=tuple(_lanes(panel)))


def _lanes(panel: Panel) -> Iterator[Lane]:
    top = 0.0
    for step in panel.steps:
        for name, bars in (
            ("compute", _compute_bars(step)),
            ("communication", _communication_bars(step)),
            ("updates", _code_bars(step)),
        ):
            placed = (_placed(bar, panel.shift_ms(step), top) for bar in bars if _is_visible(bar, step))
            yield Lane(f"rank {step.rank}  {name}", top, tuple(placed))
            top += LANE + _GAP
        top += _RANK_GAP


def _compute_bars(step: StepReport) -> Iterator[Bar]:
    for phase in step.phases:
        if phase.name in _MEANING_OF_PHASE:
            word = "" if phase.name in _WITHOUT_A_WORD else phase.name
            for part in without([phase], step.waits):
                yield Bar(part, 0.0, LANE, _MEANING_OF_PHASE[phase.name], word)
    for part in intersection(step.waits, step.communication):
        yield Bar(part, 0.0, LANE, "exposed")
    for part in without(step.waits, step.communication):
        yield Bar(part, 0.0, LANE, "waiting")


def _communication_bars(step: StepReport) -> Iterable[Bar]:
    bars = [Bar(phase, 0.0, LANE, "DDP broadcasts buffers") for phase in step.in_phase("buffers")]
    bars += [
        Bar(one, 0.0, LANE, one.kind, str(bucket.index)) for bucket in step.buckets for one in bucket.collectives()
    ]
    return _stacked(bars)


def _code_bars(step: StepReport) -> Iterable[Bar]:
    bars = [
        Bar(one, 0.0, LANE, _meaning_of_code(one), str(bucket.index))
        for bucket in step.buckets
        for one in bucket.activities
        if not one.is_collective
    ]
    return _stacked([bar for bar in bars if _is_visible(bar, step)])


def _meaning_of_code(activity: Activity) -> str:
    return _MEANING_OF_CODE.get(activity.kind, activity.kind)


def _stacked(bars: list[Bar]) -> list[Bar]:
    """Bars that overlap in time share the lane's height."""
    rows = lanes([bar.interval for bar in bars])
    height = LANE / (max(rows, default=0) + 1)
    return [replace(bar, top=row * height, height=height) for bar, row in zip(bars, rows, strict=True)]


def _is_visible(bar: Bar, step: StepReport) -> bool:
    return bar.interval.duration_ms >= _LEAST_SHARE * step.step_ms


def _placed(bar: Bar, shift_ms: float, top: float) -> Bar:
    moved = Interval(bar.interval.start_ms + shift_ms, bar.interval.end_ms + shift_ms)
    return replace(bar, interval=moved, top=top + bar.top)
