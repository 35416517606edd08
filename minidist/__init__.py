"""minidist: how one model is trained across many chips, small enough to read in a weekend."""

from minidist import autograd as autograd
from minidist import schedule as schedule
from minidist.comm import algorithms as algorithms
from minidist.comm.checked import CommMismatch as CommMismatch
from minidist.comm.comm import Comm as Comm
from minidist.comm.layers import name_layer as name_layer
from minidist.comm.partition import partition as partition
from minidist.comm.transport import Started as Started
from minidist.comm.transport import Transport as Transport
from minidist.data import stdlib_tokens as stdlib_tokens
from minidist.launch import LaunchError as LaunchError
from minidist.launch import launch as launch
from minidist.launch import world_from_env as world_from_env
from minidist.loss import global_tokens as global_tokens
from minidist.loss import token_loss as token_loss
from minidist.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from minidist.memory import PeakMemory as PeakMemory
from minidist.memory import optimizer_tensors as optimizer_tensors
from minidist.memory import storage_bytes as storage_bytes
from minidist.mesh import Mesh as Mesh
from minidist.models.gpt import GPT as GPT
from minidist.models.gpt import GPTConfig as GPTConfig
from minidist.optim import SGD as SGD
from minidist.optim import AdamW as AdamW
from minidist.parallel.data import DataParallel as DataParallel
from minidist.parallel.data import average_gradients as average_gradients
from minidist.parallel.paced import pace_compute as pace_compute
from minidist.parallel.pipeline import PipelineParallel as PipelineParallel
from minidist.parallel.tensor import gpt_plan as gpt_plan
from minidist.parallel.tensor import tensor_parallel as tensor_parallel
from minidist.parallel.zero import Zero as Zero
from minidist.placement import Partial as Partial
from minidist.placement import Replicate as Replicate
from minidist.placement import Shard as Shard
from minidist.placement import grad_norm as grad_norm
from minidist.placement import place as place
from minidist.placement import placement_of as placement_of
from minidist.placement import redistribute as redistribute
from minidist.plan import cost as cost
from minidist.plan import hardware as hardware
from minidist.plan.fit import fit_alpha_beta as fit_alpha_beta
from minidist.plan.hardware import Chip as Chip
from minidist.plan.hardware import Cluster as Cluster
from minidist.plan.hardware import Link as Link
from minidist.plan.memory import zero_memory as zero_memory
from minidist.plan.memory import zero_traffic as zero_traffic
from minidist.plan.sharded import sharded_step as sharded_step
from minidist.plan.step import data_parallel_step as data_parallel_step
from minidist.sharded import roles as roles
from minidist.sharded.whole import full_grads as full_grads
from minidist.sharded.whole import full_state_dict as full_state_dict
from minidist.staged.split import split_stages as split_stages
from minidist.timeline import Span as Span
from minidist.timeline import Timeline as Timeline

__all__ = [
    "GPT",
    "SGD",
    "AdamW",
    "Chip",
    "Cluster",
    "Comm",
    "CommMismatch",
    "DataParallel",
    "GPTConfig",
    "LaunchError",
    "Link",
    "Mesh",
    "Partial",
    "PeakMemory",
    "PipelineParallel",
    "Replicate",
    "Shard",
    "Span",
    "Started",
    "Timeline",
    "Transport",
    "Zero",
    "algorithms",
    "autograd",
    "average_gradients",
    "cost",
    "data_parallel_step",
    "fit_alpha_beta",
    "full_grads",
    "full_state_dict",
    "global_tokens",
    "gpt_plan",
    "grad_norm",
    "hardware",
    "launch",
    "name_layer",
    "optimizer_tensors",
    "pace_compute",
    "partition",
    "place",
    "placement_of",
    "redistribute",
    "roles",
    "schedule",
    "sharded_step",
    "split_stages",
    "stdlib_tokens",
    "storage_bytes",
    "tensor_parallel",
    "token_loss",
    "vocab_parallel_cross_entropy",
    "world_from_env",
    "zero_memory",
    "zero_traffic",
]
