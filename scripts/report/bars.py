"""Bar charts: numbers as parts of the largest one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """One number."""

    label: str
    value: float
    text: str  # the number with its unit, and what else is said of it
    is_ours: bool = True


@dataclass(frozen=True)
class Chart:
    """Bars of one unit, and what they are of."""

    title: str
    bars: tuple[Bar, ...]

    def percent(self, bar: Bar) -> float:
        """Return a bar's length in percent of the longest one's."""
        longest = max(other.value for other in self.bars)
        return 100 * bar.value / longest if longest > 0 else 0.0
