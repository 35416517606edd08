"""Figures: data in, matplotlib figure out. `from minidist import viz`; the rest of the package runs without it."""

from minidist.viz.charts import alpha_beta as alpha_beta
from minidist.viz.charts import beside as beside
from minidist.viz.charts import curves as curves
from minidist.viz.cuts import cut as cut
from minidist.viz.cuts import cut_explorer as cut_explorer
from minidist.viz.explore import Explorer as Explorer
from minidist.viz.explorers import arrival_explorer as arrival_explorer
from minidist.viz.explorers import cost_explorer as cost_explorer
from minidist.viz.explorers import overlap_explorer as overlap_explorer
from minidist.viz.explorers import ring_explorer as ring_explorer
from minidist.viz.holdings import holdings as holdings
from minidist.viz.holdings import marks as marks
from minidist.viz.holdings import replay as replay
from minidist.viz.holdings import ring_step as ring_step
from minidist.viz.holdings import ring_strip as ring_strip
from minidist.viz.layers import layer_times as layer_times
from minidist.viz.layers import links as links
from minidist.viz.layers import links_explorer as links_explorer
from minidist.viz.memory import kept as kept
from minidist.viz.memory import memory as memory
from minidist.viz.memory import memory_explorer as memory_explorer
from minidist.viz.ranks import world as world
from minidist.viz.source import show as show
from minidist.viz.timelines import timeline as timeline
from minidist.viz.timelines import timelines as timelines
