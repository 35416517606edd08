"""minidist: how one model is trained across many chips, small enough to read in a weekend."""

from minidist.data import stdlib_tokens as stdlib_tokens
from minidist.launch import LaunchError as LaunchError
from minidist.launch import launch as launch
from minidist.loss import global_tokens as global_tokens
from minidist.loss import token_loss as token_loss
from minidist.mesh import Mesh as Mesh
from minidist.models.gpt import GPT as GPT
from minidist.models.gpt import GPTConfig as GPTConfig
from minidist.optim import SGD as SGD
from minidist.optim import AdamW as AdamW
from minidist.parallel.data import DataParallel as DataParallel
from minidist.parallel.data import average_gradients as average_gradients
from minidist.timeline import Span as Span
from minidist.timeline import Timeline as Timeline

__all__ = [
    "GPT",
    "SGD",
    "AdamW",
    "DataParallel",
    "GPTConfig",
    "LaunchError",
    "Mesh",
    "Span",
    "Timeline",
    "average_gradients",
    "global_tokens",
    "launch",
    "stdlib_tokens",
    "token_loss",
]
