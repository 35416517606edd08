"""Pipeline schedules as programs: written, checked, timed and drawn without a tensor. Nothing here needs torch."""

from minidist.schedule.costs import costs as costs
from minidist.schedule.greedy import backward_first as backward_first
from minidist.schedule.greedy import forward_first as forward_first
from minidist.schedule.greedy import greedy as greedy
from minidist.schedule.library import SCHEDULES as SCHEDULES
from minidist.schedule.library import build as build
from minidist.schedule.program import Action as Action
from minidist.schedule.program import Name as Name
from minidist.schedule.program import Program as Program
from minidist.schedule.program import loop as loop
from minidist.schedule.program import parse as parse
from minidist.schedule.program import reads as reads
from minidist.schedule.program import vee as vee
from minidist.schedule.program import writes as writes
from minidist.schedule.simulate import Message as Message
from minidist.schedule.simulate import Report as Report
from minidist.schedule.simulate import lower as lower
from minidist.schedule.simulate import messages as messages
from minidist.schedule.simulate import simulate as simulate
from minidist.schedule.simulate import validate as validate
