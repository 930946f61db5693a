"""What pictures are made with: boxes in pixels, and labels that keep off each other and off what is drawn."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

FONT = 12
APART = 5  # pixels between two labels, so that they are not read as one
CHARACTER = 0.6 * FONT + 0.1  # width of a character of a monospaced font; others are narrower on the average


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels; y grows downwards."""

    x: float
    y: float
    width: float
    height: float

    def meets(self, other: "Box", gap: float = 2) -> bool:
        """Whether the two are closer than `gap`."""
        return (
            self.x < other.x + other.width + gap
            and other.x < self.x + self.width + gap
            and self.y < other.y + other.height + gap
            and other.y < self.y + self.height + gap
        )

    def inside(self, frame: "Box") -> bool:
        return (
            self.x >= frame.x
            and self.y >= frame.y
            and self.x + self.width <= frame.x + frame.width
            and self.y + self.height <= frame.y + frame.height
        )


class Boxes:
    """Boxes that are asked for their neighbours: kept by the squares of a grid that they touch."""

    CELL = 40.0  # pixels

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], list[Box]] = {}

    def append(self, box: Box) -> None:
        for cell in self._touched(box, 0):
            self._cells.setdefault(cell, []).append(box)

    def __iadd__(self, boxes: Iterable[Box]) -> Self:
        for box in boxes:
            self.append(box)
        return self

    def meet(self, box: Box, gap: float = 2) -> bool:
        """Whether any of them is closer to the box than `gap`."""
        return any(box.meets(other, gap) for cell in self._touched(box, gap) for other in self._cells.get(cell, ()))

    def _touched(self, box: Box, gap: float) -> Iterator[tuple[int, int]]:
        columns = range(int((box.x - gap) // self.CELL), int((box.x + box.width + gap) // self.CELL) + 1)
        rows = range(int((box.y - gap) // self.CELL), int((box.y + box.height + gap) // self.CELL) + 1)
        return ((column, row) for column in columns for row in rows)


@dataclass(frozen=True)
class Label:
    """A text with its place. leader: the ends of the line to what it names, None where that is near."""

    text: str
    box: Box
    leader: tuple[float, float, float, float] | None


@dataclass
class Labels:
    """The labels inside a frame. occupied: what they must keep off."""

    frame: Box
    occupied: Boxes = field(default_factory=Boxes)
    placed: Boxes = field(default_factory=Boxes)

    def place(self, text: str, point: tuple[float, float, float], spots: Iterable[tuple[float, float]]) -> Label | None:
        """The text at the first of `spots` (its box's corner) that is free, with a line to the point (x, y, radius)
        where that is far (radius infinity: never); None where no spot is free."""
        x, y, own = point
        width, height = len(text) * CHARACTER, FONT + 2
        for box_x, box_y in spots:
            box = Box(box_x, box_y, width, height)
            near_x, near_y = min(max(x, box_x), box_x + width), min(max(y, box_y), box_y + height)
            far = math.hypot(near_x - x, near_y - y) > 16 + own
            leader = along(x, y, near_x, near_y) if far else []
            free = box.inside(self.frame) and not self.occupied.meet(box) and not self.placed.meet(box, APART)
            if free and not any(self.placed.meet(dash, 0) for dash in leader):
                self.occupied += [box, *leader]
                self.placed.append(box)
                return Label(text, box, (x, y, near_x, near_y) if far else None)
        return None


def along(x1: float, y1: float, x2: float, y2: float) -> list[Box]:
    """Small boxes on a line."""
    steps = max(1, int(math.hypot(x2 - x1, y2 - y1) / 6))
    return [Box(x1 + (x2 - x1) * i / steps - 1, y1 + (y2 - y1) * i / steps - 1, 2, 2) for i in range(steps + 1)]


def around(x: float, y: float, radius: float, width: float, furthest: int = 420) -> Iterator[tuple[float, float]]:
    """Corners of label boxes round a dot: beside it, then on wider and wider rings."""
    half = (FONT + 2) / 2
    for distance in range(4, furthest, 8):
        for turn in range(16):
            angle = turn * math.pi / 8
            cos, sin = math.cos(angle), math.sin(angle)
            middle_x = x + (radius + distance) * cos + (width / 2) * (1 if cos > 0.1 else -1 if cos < -0.1 else 0)
            yield middle_x - width / 2, y + (radius + distance + half * abs(sin)) * sin - half
