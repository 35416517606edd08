"""Figures: labelled, in one palette, nothing clipped, and they draw what they are given."""

import subprocess
import sys
from itertools import pairwise

import matplotlib as mpl
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

mpl.use("Agg")

from minidist import viz
from minidist.schedule import build, simulate
from minidist.timeline import Span, Timeline
from minidist.viz import style
from minidist.viz.explorers import arrival
from minidist.viz.holdings import sent_in, sources
from minidist.viz.timelines import colour_of

PALETTE = {colour.upper() for colour in (*style.RANK_COLOURS, style.GREY, style.INK, style.FAINT, style.PAPER)}


def ring(ranks):
    """What the ranks of a ring hold before each step and at the end, by index arithmetic."""
    held = [viz.marks(rank, ranks) for rank in range(ranks)]
    states = [held]
    for step in range(2 * (ranks - 1)):
        now = [list(row) for row in held]
        for rank in range(ranks):
            piece = (rank - 2 - step) % ranks
            came = held[rank - 1][piece]
            now[rank][piece] = came if step >= ranks - 1 else held[rank][piece] + came
        held = now
        states.append(held)
    return states


RING = ring(4)
STEP = Timeline(
    [
        Span(0, "forward 0", 0, 1),
        Span(0, "backward 0", 1, 3),
        Span(0, "all_reduce", 2, 4, "comm"),
        Span(0, "update", 4, 5),
    ],
    paced=True,
)
ZB_V = simulate(build("zb_v", 4, 8, stages_per_rank=2), 0.5, 0.5, 0.5)
SIZES = [10**k for k in range(2, 9)]
KEPT = {("bfloat16", "AdamW"): {0: {1: 16, 4: 16}, 3: {1: 16, 4: 4}}}
SCALED = {
    "beside": lambda: viz.beside(590_000, 590_592, 300_000, unit="bytes", title="Sent", axis="sent by one rank"),
    "beside, prediction open": lambda: viz.beside(0.4, 0.4, None, unit="s", title="Time", axis="time", paced=True),
    "curves": lambda: viz.curves([1, 2], {"a": [1, 2]}, {"a": [1, 2]}, "ranks", "time [ms]", "Two", log="xy"),
    "alpha_beta": lambda: viz.alpha_beta(SIZES, [1e-4 + s / 1e9 for s in SIZES], 1e-4, 1e-9, "A message"),
    "timeline": lambda: viz.timeline(STEP, "A step"),
    "timelines": lambda: viz.timelines({"a": STEP, "b": arrival([0.1, 0.3])}),
    "arrival": lambda: viz.arrival_explorer().figure(),
    "overlap": lambda: viz.overlap_explorer().figure(),
    "cost": lambda: viz.cost_explorer().figure(),
    "memory": lambda: viz.memory(7.5e9, 64, "bfloat16", "AdamW", KEPT),
    "memory, many chips": lambda: viz.memory(70e9, 8, "float32", "SGD"),
    "memory explorer": lambda: viz.memory_explorer(KEPT).figure(),
    "links": lambda: viz.links(),
    "pipeline": lambda: viz.pipeline({"a": ZB_V, "b": simulate(build("gpipe", 2, 3))}, unit="ms"),
    "pipeline explorer": lambda: viz.pipeline_explorer().figure(),
    "layer_times": lambda: viz.layer_times({"a": (1, 2), "b": (1, 0, 3)}, "A layer", paced=True),
}
PICTURES = {
    "kept": lambda: viz.kept(4),
    "kept, one moment": lambda: viz.kept(7, moments=1),
    "holdings": lambda: viz.holdings({"all-reduce": (RING[0], RING[-1]), "nothing": (RING[0], RING[0])}),
    "ring_step": lambda: viz.ring_step(RING, 2),
    "ring_strip": lambda: viz.ring_strip(RING),
    "world": lambda: viz.world([{"process": 1, "x": 2}, {"process": 3, "x": 4}], {"world": [0, 1]}),
    **{f"cut by {name}": lambda name=name: viz.cut(name) for name in ("column", "row", "pair", "heads")},
    "cut over eight": lambda: viz.cut("heads", ranks=8, tokens=32768, width=8192, heads=64),
}


def faults(fig, scaled):
    """What is wrong with a figure: unlabelled axes, no word on where the numbers come from, text outside of it."""
    wrong = []
    axes = [ax for ax in fig.axes if ax.get_visible()]
    if scaled and not any(text.get_text().startswith("Refused") for ax in axes for text in ax.texts):
        # Timelines share one axis of time, labelled once, and their y axis names the ranks.
        if not axes[-1].get_xlabel():
            wrong.append("no label on the x axis")
        wrong += ["no names on the y axis" for ax in axes if not ax.get_ylabel() and not _named(ax)]
        kinds = ("(measured)", "(paced)", "(predicted)")
        wrong += [
            f"{ax.get_title(loc='left')!r} says no kind" for ax in axes if not ax.get_title(loc="left").endswith(kinds)
        ]
    fig.draw_without_rendering()
    inside = fig.bbox.padded(2)
    written = [*fig.texts, *fig.legends]
    for ax in axes:
        legend = [ax.get_legend()] if ax.get_legend() else []
        written += [ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label, *ax.texts, *legend]
    for thing in written:
        text = thing.get_text() if isinstance(thing, Text) else "the legend"
        box = thing.get_window_extent()
        clipped = thing.get_clip_on() and thing.get_clip_box() is not None
        if text and not clipped and not (inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)):
            wrong.append(f"{text!r} leaves the figure")
    return wrong


def _named(ax):
    return any(
        label.get_text().strip() and not label.get_text().replace(".", "").isdigit() for label in ax.get_yticklabels()
    )


@pytest.mark.parametrize("name", [*SCALED, *PICTURES])
def test_figure_is_labelled_and_not_clipped(name):
    fig = {**SCALED, **PICTURES}[name]()
    assert faults(fig, name in SCALED) == []
    assert style.png(fig).startswith(b"\x89PNG")


def test_an_unlabelled_or_clipped_figure_is_found():
    fig = SCALED["curves"]()
    fig.axes[0].set_xlabel("")
    assert faults(fig, True) == ["no label on the x axis"]
    fig = SCALED["curves"]()
    fig.text(1.2, 0.5, "out here")
    assert faults(fig, True) == ["'out here' leaves the figure"]
    fig = SCALED["curves"]()
    fig.axes[0].set_title("Two", loc="left")
    assert faults(fig, True) == ["'Two' says no kind"]


@pytest.mark.parametrize("name", [*SCALED, *PICTURES])
def test_colours_come_from_the_palette(name):
    fig = {**SCALED, **PICTURES}[name]()
    patches = [patch for ax in fig.axes for patch in ax.patches]
    lines = [line for ax in fig.axes for line in ax.lines]
    used = {to_hex(p.get_facecolor()).upper() for p in patches if p.get_fill()} | {
        to_hex(x.get_color()).upper() for x in lines
    }
    assert used <= PALETTE


def test_palette_differs_in_lightness_between_neighbours():
    """So that ranks next to each other stay apart in grey, too."""

    def lightness(colour):
        r, g, b = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.299 * r + 0.587 * g + 0.114 * b

    assert all(abs(lightness(a) - lightness(b)) > 0.1 for a, b in pairwise(style.RANK_COLOURS))


def test_marks_tell_where_a_sum_came_from():
    for ranks in range(1, 8):
        total = [sum(column) for column in zip(*(viz.marks(rank, ranks) for rank in range(ranks)), strict=True)]
        assert [sources(value, ranks) for value in total] == [
            (chr(ord("A") + piece), list(range(ranks))) for piece in range(ranks)
        ]
        assert max(total) < 2**63
    with pytest.raises(ValueError, match="1 to 7"):
        viz.marks(0, 8)
    with pytest.raises(ValueError, match=r"viz\.marks"):
        sources(1 << 20, 2)


def test_ring_step_frames_what_is_passed_on():
    assert sent_in(RING, 0) == {(0, 3), (1, 0), (2, 1), (3, 2)}  # rank r passes slice r-1 first
    assert sent_in(RING, len(RING) - 1) == set()
    frames = [
        p for p in viz.ring_step(RING, 0).axes[0].patches if to_hex(p.get_edgecolor()).upper() == style.VERMILLION
    ]
    assert {(-p.get_y() / 1.45, p.get_x()) for p in frames if p.get_width() == 1} >= {(0, 3), (1, 0), (2, 1), (3, 2)}


def test_timeline_draws_every_span_at_its_time():
    boxes = [p for p in viz.timeline(STEP).axes[0].patches]
    assert [(p.get_x(), p.get_width()) for p in boxes] == [(0, 1000), (1000, 2000), (4000, 1000), (2000, 2000)]
    assert colour_of(Span(0, "backward 7", 0, 1)) != colour_of(Span(0, "forward 7", 0, 1))
    with pytest.raises(ValueError, match="no timeline"):
        viz.timelines({})


def test_kept_fills_a_rank_s_slice_of_what_is_cut_and_all_of_what_is_not():
    """Stage 2 on 4 ranks, rank 1: all pieces of the parameters, the second of gradients and moments."""
    ax = viz.kept(4).axes[2]
    row = [p for p in ax.patches if p.get_fill() and round((p.get_y() + 1.3) * 4) in range(4) and -1.3 <= p.get_y() < 0]
    columns = {}
    for piece in row:
        column = columns.setdefault(round(piece.get_x() / 1.25), [])
        column.append(to_hex(piece.get_facecolor()).upper() != style.PAPER)
    assert columns[0] == [True] * 4
    assert columns[1] == columns[2] == columns[3] == [False, True, False, False]


def test_memory_draws_the_formula_and_the_measured_points():
    left, right = viz.memory(1e9, 4, "bfloat16", "AdamW", KEPT).axes
    points = {
        tuple(map(float, at)) for line in left.lines if line.get_linestyle() == "None" for at in line.get_xydata()
    }
    assert points == {(1, 16), (4, 16), (4, 4)}
    ends = {}
    for bar in right.patches:
        ends[round(bar.get_y() + 0.31)] = max(ends.get(round(bar.get_y() + 0.31), 0), bar.get_x() + bar.get_width())
    assert ends == pytest.approx({0: 16, 1: 7, 2: 5.5, 3: 4})  # GB, the published table for 4 ranks


def test_beside_draws_the_numbers_it_is_given():
    ax = viz.beside(590_000, 590_592, None, unit="bytes").axes[0]
    assert [patch.get_width() for patch in ax.patches] == [0, 590.592, 590.0]
    assert any("still open" in text.get_text() for text in ax.texts)


def test_cut_draws_each_rank_once_and_says_what_is_sent():
    fig = viz.cut("row", ranks=4, tokens=256, width=64, hidden=192)
    faces = [to_hex(p.get_facecolor()).upper() for p in fig.axes[0].patches if p.get_fill()]
    # h and B in stripes, terms on sheets: three tensors in the colours of the ranks, and the sum, alike on all
    assert sorted(faces) == sorted([style.rank_colour(rank) for rank in range(4)] * 3 + [style.FAINT])
    words = [text.get_text() for text in fig.axes[0].texts]
    assert {"[T, F/tp]", "[256, 48]", "[F/tp, D]", "[48, 64]", "[T, D] {+tp}", "all-reduce"} <= set(words)
    assert "98.3 kB" in fig.axes[0].get_title(loc="left")  # 2 x 3/4 x 256 x 64 x 4 bytes
    assert "nothing is sent" in viz.cut("column").axes[0].get_title(loc="left")
    with pytest.raises(ValueError, match="6 heads of width 96 cannot be shared out to 4 ranks"):
        viz.cut("heads", ranks=4, width=96, heads=6)
    with pytest.raises(ValueError, match="none of column, row, pair, heads"):
        viz.cut("diagonal")


def test_layer_times_draws_the_seconds_it_is_given():
    ax = viz.layer_times({"a": (1, 2), "b": (1, 0, 3)}, paced=True).axes[0]
    drawn = [(p.get_x(), p.get_width()) for p in ax.patches if p.get_width()]
    assert drawn == [(0, 1000), (1000, 2000), (0, 1000), (1000, 3000)]
    assert [text.get_text() for text in ax.texts] == ["3 s, 67% in sums", "4 s"]


def test_pipeline_draws_every_action_where_it_runs():
    ax = viz.pipeline({"a": ZB_V}, unit="ms").axes[0]
    drawn = set()
    for boxes in ax.collections:
        for path, colour in zip(boxes.get_paths(), boxes.get_facecolors(), strict=True):
            low, high = path.get_extents().min, path.get_extents().max
            drawn.add(
                (-round(float(low[1] + high[1]) / 2), round(float(low[0])), round(float(high[0])), to_hex(colour))
            )
    idle = {(rank, 0, 25500, style.FAINT.lower()) for rank in range(4)}
    shown = {(rank, start, end) for rank, start, end, _ in drawn - idle}
    assert shown == {(span.rank, round(span.start * 1e3), round(span.end * 1e3)) for span in ZB_V.spans}
    # rank 0: stage 0 in full colours, stage 7 paler
    assert {colour.upper() for rank, start, _, colour in drawn if (rank, start) == (0, 0)} == {style.SKY, style.FAINT}
    numbers = [text.get_text() for text in ax.texts]
    assert sorted(numbers) == sorted(str(span.action.microbatch) for span in ZB_V.spans)


def test_pipeline_explorer_counts_and_refuses():
    grid, held, rates = viz.pipeline_explorer().figure(schedule="zb_h2").axes
    assert "takes 27, a micro-batch alone 12; 48 messages" in grid.get_title(loc="left")
    assert [text.get_text() for text in held.get_legend().get_texts()] == ["rank 0: at most 7", "rank 3: at most 7"]
    assert [text.get_text() for text in rates.texts] == ["11.1%", "0.0%"]
    of_a_rank = viz.pipeline_explorer().figure(**{"schedule": "interleaved", "stages a rank": 2}).axes[1]
    assert of_a_rank.get_legend().get_texts()[0].get_text() == "rank 0: at most 5.5"  # 11 stage inputs, 2 stages
    (refused,) = viz.pipeline_explorer().figure(**{"schedule": "interleaved", "micro batches": 7}).axes
    assert "7 is no multiple of 4" in " ".join(refused.texts[0].get_text().split())
    with pytest.raises(ValueError, match="no timeline to draw"):
        viz.pipeline({})


def test_show_reads_the_file_itself():
    shown = viz.show(viz.beside)
    assert shown.file == "minidist/viz/charts.py"
    assert shown.code.startswith("def beside(")
    assert "```python" in shown._repr_markdown_()
    method = viz.show(Timeline, "busy", "merge")
    assert method.code.startswith("def busy(self")
    assert "\ndef merge(self" in method.code
    with pytest.raises(AttributeError):
        viz.show(Timeline, "no_such_method")


def test_folded_code_opens_by_a_click_or_by_print():
    shown = viz.show(viz.beside, folded="an exercise asks for it")
    assert "def beside(" in str(shown)
    assert "def beside(" not in repr(shown)
    before, code = shown._repr_markdown_().split("</summary>")
    assert before.startswith("<details><summary>")
    assert "an exercise asks for it" in before
    assert "def beside(" in code


EXPLORERS = {
    "arrival": viz.arrival_explorer,
    "ring": lambda: viz.ring_explorer({2: ring(2), 3: ring(3), 4: RING}),
    "overlap": viz.overlap_explorer,
    "cost": viz.cost_explorer,
    "memory": lambda: viz.memory_explorer(KEPT),
    "cut": viz.cut_explorer,
    "links": viz.links_explorer,
    "pipeline": viz.pipeline_explorer,
}
WITHOUT_SCALES = ("ring", "cut")


@pytest.mark.parametrize("name", EXPLORERS)
def test_explorer_redraws_and_is_a_figure_without_widgets(name, monkeypatch):
    explorer = EXPLORERS[name]()
    bundle = explorer._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "image/png"} <= set(bundle)

    box = explorer.widget()
    picture = box.children[-1]
    before = bytes(picture.value)
    slider = next(child for child in box.children if getattr(child, "options", None))
    slider.value = next(value for value in slider.options if value != slider.value)
    assert bytes(picture.value) != before

    for option, values in explorer.options.items():  # no setting may fail
        for value in (values[0], values[-1]):
            assert faults(explorer.figure(**{option: value}), name not in WITHOUT_SCALES) == []

    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert set(explorer._repr_mimebundle_()) == {"image/png", "text/plain"}


def test_play_runs_through_the_steps():
    import ipywidgets

    box = viz.ring_explorer({4: RING}).widget()
    play = next(child for child in box.children if isinstance(child, ipywidgets.Play))
    slider = next(child for child in box.children if getattr(child, "description", "") == "step")
    play.value = 3
    assert slider.value == 3
    assert play.max == len(RING) - 1


def test_package_does_not_load_matplotlib():
    heavy = "{'matplotlib', 'ipywidgets', 'IPython'}"
    code = f"import sys; from minidist import viz; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
