"""What a bench tells: rows with their floors and targets, as a table, as JSON, as an exit status."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final, Protocol

import attrs

from bench.measure import Sample

_MIB: Final = 2**20
_HEAD: Final = (
    f"{'':26}{'ms':>9}{'floor ms':>10}{'ratio':>7}{'of cpu':>8}{'held ms':>9}{'cpu ms':>8}{'MiB':>7}"
    "  target"
)


@attrs.frozen(kw_only=True)
class Target:
    """What a row is held to; None: not held to it."""

    took_s: float | None = None
    """At most this long."""
    over_floor_s: float | None = None
    """At most this much longer than its floor."""
    ratio: float | None = None
    """At most so many times its floor."""
    ratio_from_s: float = 0.0
    """A floor shorter than this says nothing: the fixed number of syncs is longer."""
    held_s: float | None = None
    peak_bytes: float | None = None


@attrs.frozen(kw_only=True)
class Row:
    """One thing that was measured, over all rounds."""

    name: str
    samples: list[Sample]
    floors_s: list[float] = attrs.field(factory=list)
    """Of the same rounds; empty: it has none."""
    floors_cpu_s: list[float] = attrs.field(factory=list)
    """Their processor time, where it was measured."""
    kept_bytes: int = 0
    """Of the peak, what stays because it is the result."""
    target: Target = attrs.field(factory=Target)

    @property
    def took_s(self) -> float:
        return median(sample.took_s for sample in self.samples)

    @property
    def floor_s(self) -> float | None:
        return median(self.floors_s) if self.floors_s else None

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios: the load of a moment is in both."""
        if not self.floors_s:
            return None
        pairs = zip(self.samples, self.floors_s, strict=True)
        return median(sample.took_s / floor_s for sample, floor_s in pairs)

    @property
    def cpu_ratio(self) -> float | None:
        """As `ratio`, in processor time: the same on an idle and on a loaded machine."""
        if not self.floors_cpu_s:
            return None
        pairs = zip(self.samples, self.floors_cpu_s, strict=True)
        return median(sample.cpu_s / floor_s for sample, floor_s in pairs)

    @property
    def over_floor_s(self) -> float | None:
        if not self.floors_s:
            return None
        pairs = zip(self.samples, self.floors_s, strict=True)
        return median(sample.took_s - floor_s for sample, floor_s in pairs)

    @property
    def held_s(self) -> float:
        return median(sample.held_s for sample in self.samples)

    @property
    def held_cpu_s(self) -> float:
        return median(sample.held_cpu_s for sample in self.samples)

    @property
    def peak_bytes(self) -> int | None:
        """The highest of all rounds: later ones find memory that earlier ones have left."""
        peaks = [sample.peak_bytes for sample in self.samples if sample.peak_bytes is not None]
        return max(0, max(peaks) - self.kept_bytes) if peaks else None

    def missed(self) -> list[str]:
        """What of its target it missed."""
        target = self.target
        ratio = self.ratio if (self.floor_s or 0.0) >= target.ratio_from_s else None
        found = [
            ("", self.took_s, target.took_s, 1e3, "ms"),
            ("beyond its floor ", self.over_floor_s, target.over_floor_s, 1e3, "ms"),
            ("of its floor ", ratio, target.ratio, 1.0, "x"),
            ("held ", self.held_s, target.held_s, 1e3, "ms"),
            ("memory ", self.peak_bytes, target.peak_bytes, 1 / _MIB, "MiB"),
        ]
        return [
            f"{what}{value * scale:.1f} {unit}, target {limit * scale:g}"
            for what, value, limit, scale, unit in found
            if value is not None and limit is not None and value > limit
        ]

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "took_s": self.took_s,
            "floor_s": self.floor_s,
            "ratio": self.ratio,
            "cpu_ratio": self.cpu_ratio,
            "over_floor_s": self.over_floor_s,
            "held_s": self.held_s,
            "held_cpu_s": self.held_cpu_s,
            "peak_bytes": self.peak_bytes,
            "samples": [attrs.asdict(sample) for sample in self.samples],
            "floors_s": self.floors_s,
            "target": attrs.asdict(self.target, filter=lambda _, value: value is not None),
            "missed": self.missed(),
        }

    def line(self) -> str:
        """The row of the table."""
        ratio, over_s = self.ratio, self.over_floor_s
        shown = "" if ratio is None else f"{ratio:.2f}"
        if self.target.over_floor_s is not None and over_s is not None:
            shown = f"+{over_s * 1e3:.0f}"
        floor = "" if self.floor_s is None else f"{self.floor_s * 1e3:.1f}"
        peak = "" if self.peak_bytes is None else f"{self.peak_bytes / _MIB:.0f}"
        of_cpu = "" if self.cpu_ratio is None else f"{self.cpu_ratio:.2f}"
        told = "; ".join(self.missed())
        return (
            f"  {self.name:24}{self.took_s * 1e3:9.1f}{floor:>10}{shown:>7}{of_cpu:>8}"
            f"{self.held_s * 1e3:9.1f}{self.held_cpu_s * 1e3:8.1f}{peak:>7}"
            f"  {'MISSED: ' + told if told else self._aim()}"
        ).rstrip()

    def _aim(self) -> str:
        target = self.target
        if target.took_s is not None:
            return f"<= {target.took_s * 1e3:g} ms"
        if target.over_floor_s is not None:
            return f"<= floor + {target.over_floor_s * 1e3:g} ms"
        if target.ratio is not None:
            applies = (self.floor_s or 0.0) >= target.ratio_from_s
            return f"<= {target.ratio:g} x floor" if applies else "floor too short to compare"
        return ""


@attrs.frozen(kw_only=True)
class Section:
    """Rows that belong together, such as one size."""

    title: str
    facts: dict[str, object]
    rows: list[Row]

    def to_json(self) -> dict[str, object]:
        return {"title": self.title, **self.facts, "rows": [row.to_json() for row in self.rows]}

    def print(self) -> None:
        print(f"\n{self.title}")
        print(_HEAD)
        for row in self.rows:
            print(row.line())
        sys.stdout.flush()

    def missed(self) -> list[str]:
        return [f"{self.title}: {row.name}: {why}" for row in self.rows for why in row.missed()]


class Told(Protocol):
    """A section, of whatever is measured."""

    def missed(self) -> list[str]: ...

    def to_json(self) -> dict[str, object]: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every bench can be told about its report."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 when a target is missed in this run"
    )


def conclude(
    sections: Sequence[Told],
    arguments: argparse.Namespace,
    missed_between: Sequence[str] = (),
) -> int:
    """Tell what was missed, write the JSON, give the exit status.

    Args:
        missed_between: what was missed when sections were compared, such as linear growth.
    """
    missed = [*(line for section in sections for line in section.missed()), *missed_between]
    print("\nevery target was met" if not missed else "\nmissed:")
    for line in missed:
        print(f"  {line}")
    if arguments.json is not None:
        found = {
            "python": platform.python_version(),
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
            "sections": [section.to_json() for section in sections],
            "missed": missed,
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if missed and arguments.check else 0
