"""The picture: well-formed, self-contained, everything inside its frame, no two labels on one place."""

import itertools
import re
from xml.etree import ElementTree

import profile_builders as made
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.bench.profile.plot import FRAME, HEIGHT, draw
from roofline.bench.profile.profile import ProfiledStep
from roofline.bench.svg import CHARACTER, FONT, Box

SVG = "{http://www.w3.org/2000/svg}"
STEPS = st.sampled_from([ProfiledStep(1, 8), ProfiledStep(1, 700), ProfiledStep(512), ProfiledStep(1, 100, batch=16)])


def labels(panel: ElementTree.Element) -> dict[str, Box]:
    """The texts of dots and of level roofs, with their boxes."""
    found = {}
    for number, text in enumerate(panel.iter(f"{SVG}text")):
        if "x" in text.attrib and not {"text-anchor", "class", "transform"} & set(text.attrib):
            words = "".join(text.itertext())
            box = Box(float(text.get("x")), float(text.get("y")) - FONT + 1, len(words) * CHARACTER, FONT + 2)
            found[f"{number} {words}"] = box
    return found


@settings(max_examples=40, deadline=None)
@given(STEPS, st.lists(st.floats(1e-4, 1e-1), min_size=made.COUNT, max_size=made.COUNT))
def test_labels_keep_apart_and_inside(step: ProfiledStep, each: list[float]) -> None:
    profile = made.made(step, each)
    root = ElementTree.fromstring(draw([profile], "a <model> & a chip"))
    (panel,) = root.findall(f"{SVG}g")
    boxes = labels(panel)
    shown = [op for op in profile.ops if op.flops]
    for name, box in boxes.items():
        assert box.inside(Box(FRAME.x - 0.1, FRAME.y - 0.1, FRAME.width + 0.2, FRAME.height + 0.2)), name
    for (a, first), (b, second) in itertools.combinations(boxes.items(), 2):
        assert not first.meets(second, 0), f"{a} over {b}"
    circles = [c for c in panel.iter(f"{SVG}circle") if c.get("class") == "dot"]
    assert len(circles) == len(shown)
    for circle in circles:
        assert FRAME.x <= float(circle.get("cx")) <= FRAME.x + FRAME.width
        assert FRAME.y <= float(circle.get("cy")) <= FRAME.y + FRAME.height
        dot = Box(float(circle.get("cx")) - 2, float(circle.get("cy")) - 2, 4, 4)
        assert not any(dot.meets(box, 0) for box in boxes.values())


def test_every_op_and_roof_is_named() -> None:
    profile = made.made(ProfiledStep(512), [1e-3] * made.COUNT)
    text = draw([profile, profile], "model")
    for op in profile.ops:
        assert text.count(f">{op.op} {op.shape} {op.share:.0%}<") >= 2 or not op.flops, op
    for name in ("int8: 2.0 Top/s", "bf16: 900.0 Gop/s", "f32: 500.0 Gop/s", ": 400.0 GB/s"):
        assert text.count(name) == 2
    assert "not shown, for they have none: embed, take_rows, sample" in text
    assert f'height="{2 * HEIGHT}"' in text


def test_it_needs_nothing_from_elsewhere() -> None:
    text = draw([made.made(ProfiledStep(1, 8), [1e-5] * made.COUNT)], "model")
    assert not re.search(r"<script|href=|url\(|@import|<image", text)
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}
