"""minidist: how one model is trained across many chips, small enough to read in a weekend."""

from minidist.data import stdlib_tokens as stdlib_tokens
from minidist.launch import LaunchError as LaunchError
from minidist.launch import launch as launch
from minidist.mesh import Mesh as Mesh
from minidist.models.gpt import GPT as GPT
from minidist.models.gpt import GPTConfig as GPTConfig
from minidist.optim import SGD as SGD
from minidist.optim import AdamW as AdamW
from minidist.timeline import Span as Span
from minidist.timeline import Timeline as Timeline

__all__ = ["GPT", "SGD", "AdamW", "GPTConfig", "LaunchError", "Mesh", "Span", "Timeline", "launch", "stdlib_tokens"]
