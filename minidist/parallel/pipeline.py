"""Pipeline parallelism: a model cut into stages, each on a rank, and the batch into micro-batches that pass through.

Which rank does what when is a program (`minidist.schedule`), and here it is carried out: for every action the tensors
that it reads are taken from a dictionary or received, and those that it writes are put there or sent. No schedule is
known by name, and an activation is freed when the last action that reads it is done.

The loss is a mean over the valid items of the whole batch, so a micro-batch counts by how many it has.

Sources: Huang et al., GPipe (arXiv 1811.06965), for the micro-batches; `minidist.schedule.library` for the schedules.
"""

from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.comm import Comm
from minidist.loss import IGNORE
from minidist.memory import tensors_in
from minidist.schedule.program import Action, Name, Program, reads, writes
from minidist.schedule.simulate import validate
from minidist.staged.backward import Grads, Weights, backward, input_gradient
from minidist.staged.mail import Kind, Mail, Routes, kinds
from minidist.timeline import Span, Timeline

LossFunction = Callable[[Any, Tensor], Tensor]
Batch = Tensor | Sequence[Tensor]


class PipelineParallel:
    """This rank's stages of a model, run as a program says.

        program = md.schedule.build("1f1b", ranks=world.size, microbatches=8)
        stages = md.split_stages(md.GPT(config, seed=0), program.stages)
        mine = [stages[s] for s in program.stages_of(world.rank)]
        pipeline = md.PipelineParallel(mine, program, world, loss_fn)
        loss = pipeline.step(tokens, targets)

    stages: this rank's, in ascending order. A stage gets what the one before returned, a tensor or several; what has a
    gradient gets it back. loss_fn(output, target): a mean over the micro-batch's valid items: targets other than -100,
    or rows where targets are not whole numbers. tied: pairs (name of a parameter of the first stage, of the last) that
    are one parameter; the last takes the first's values, and both get the sum of their gradients. None: what the stages
    say themselves, as those of a GPT do. seconds: in a paced run, how long an action of each kind takes, {"F": 0.01,
    "I": 0.01, "W": 0.01}.

    timeline: of the last step, this rank's actions.

    Raises: ValueError for a program that cannot run, or stages or ranks that do not fit it.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        program: Program,
        comm: Comm,
        loss_fn: LossFunction,
        tied: Sequence[tuple[str, str]] | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        validate(program)
        if comm.size != program.ranks:
            raise ValueError(f"a program for {program.ranks} ranks, and this Comm has {comm.size}")
        numbers = program.stages_of(comm.rank)
        if len(stages) != len(numbers):
            raise ValueError(
                f"rank {comm.rank} has stages {numbers} in this program: pass {len(numbers)} modules, not {len(stages)}"
            )
        self.program, self.comm, self.loss_fn = program, comm, loss_fn
        self._training, self._evaluation = ((p, Routes(p, comm.rank)) for p in (program, program.forward()))
        self.stages = dict(zip(numbers, stages, strict=True))
        self.first, self.last = program.homes[0], program.homes[program.stages - 1]
        self.seconds = seconds or {}
        self.timeline = Timeline([], ranks=[comm.ranks[comm.rank]])
        self._known: dict[tuple[int, ...], dict[Name, tuple[Kind, ...]]] = {}
        pairs = tied_in(stages[0]) if tied is None and program.stages > 1 else tied or ()
        self._tied = [self._pair(*names) for names in pairs]
        for pair in self._tied:
            self._share(pair)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, inputs: Batch | None, targets: Tensor | None, tokens: float | None = None) -> float:
        """Forward and backward for a batch: gradients are added to `grad`, and the loss is returned, on every rank.

        inputs: [B, ...] or several, cut along dim 0 by `tensor_split`; read by the first stage's rank. targets: [B,
        ...]; read by the last's. Other ranks may pass None. tokens: what to divide the sum of losses by, where a step
        of the optimizer has several of these; None: this batch's valid items.

        Raises: ValueError for a batch with fewer rows than micro-batches, inputs and targets of different length, a
        program without backward passes, and under `torch.no_grad()`.
        """
        if all(action.kind == "F" for action in self.program[self.comm.rank]) or not torch.is_grad_enabled():
            why = "gradients are off" if not torch.is_grad_enabled() else "this program has forward passes only"
            raise ValueError(f"a step goes forward and back, and {why}: `evaluate` goes forward alone")
        if tokens is not None and not tokens > 0:
            raise ValueError(f"tokens={tokens}: how many the sum of losses is divided by, more than 0")
        before = {p: p.grad for pair in self._tied for p in pair if p is not None}
        for parameter in before:
            parameter.grad = None
        loss = self._run(*self._training, inputs, targets, tokens)
        for pair in self._tied:
            self._add_gradients(pair)
        for parameter, grad in before.items():
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Batch | None, targets: Tensor | None) -> float:
        """The loss of a batch, without a backward pass."""
        return self._run(*self._evaluation, inputs, targets, None)

    def _run(
        self, program: Program, routes: Routes, inputs: Batch | None, targets: Tensor | None, tokens: float | None
    ) -> float:
        data = self._microbatches(inputs) if self.comm.rank == self.first else []
        answers = self._targets(targets, tokens) if self.comm.rank == self.last else []
        shape = self._signature(data, answers)
        known = self._known.get(shape)
        mail = Mail(routes, self.comm, {} if known is None else known, letters=known is None)
        run = _Run(self, program, mail, data, answers)
        for action in program[self.comm.rank]:
            run.do(action)
        mail.finish()
        self._known[shape] = mail.known
        self.timeline = Timeline(run.spans, ranks=[self.comm.ranks[self.comm.rank]], paced=self.comm.pace is not None)
        return self.comm.broadcast(run.loss, self.last).item()

    def modelled(self, kind: str) -> float | None:
        """Seconds that an action of this kind takes in a paced run, where they are given."""
        if kind == "B" and "B" not in self.seconds and "I" in self.seconds:
            return self.seconds["I"] + self.seconds.get("W", 0.0)
        return self.seconds.get(kind)

    # ---- the batch ---------------------------------------------------------------------------------------------------

    def _microbatches(self, inputs: Batch | None) -> list[tuple[Tensor, ...]]:
        if inputs is None:
            raise ValueError(f"rank {self.comm.rank} has the first stage: pass the inputs")
        tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if len({len(tensor) for tensor in tensors}) != 1:
            rows = [len(tensor) for tensor in tensors]
            raise ValueError(f"inputs of {rows} rows: give one tensor, or several that are as long as one another")
        return list(zip(*(self._cut(tensor) for tensor in tensors), strict=True))

    def _cut(self, x: Tensor) -> tuple[Tensor, ...]:
        if len(x) < self.program.microbatches:
            raise ValueError(f"{len(x)} rows do not make {self.program.microbatches} micro-batches: take fewer")
        return x.tensor_split(self.program.microbatches)

    def _targets(self, targets: Tensor | None, tokens: float | None) -> list[tuple[Tensor, float]]:
        """Every micro-batch's targets, and how much its mean loss counts."""
        if targets is None:
            raise ValueError(f"rank {self.comm.rank} has the last stage: pass the targets")
        parts = self._cut(targets)
        counts = [valid(part) for part in parts]
        total = max(sum(counts), 1) if tokens is None else tokens
        return [(part, count / total) for part, count in zip(parts, counts, strict=True)]

    def _signature(
        self, data: Sequence[tuple[Tensor, ...]], answers: Sequence[tuple[Tensor, float]]
    ) -> tuple[int, ...]:
        """All that says what messages will be like, the same on every rank. Compares the lengths of the batch.

        That is how the micro-batches are shaped, and on each rank what its stages train, in which types and mode.
        """
        kind = self.comm.device.type
        state = [torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
        for stage in self.stages.values():
            state += [(p.requires_grad, p.dtype) for p in stage.parameters()]
            state += [module.training for module in stage.modules()]
        here = hash((*state, *(k for m in data for k in kinds(m))))
        rows = sum(len(first) for first, *_ in data), sum(len(target) for target, _ in answers)
        everywhere = self.comm.all_gather(torch.tensor([here, *rows], device=self.comm.device)).view(-1, 3).tolist()
        if (given := everywhere[self.first][1]) != (wanted := everywhere[self.last][2]):
            raise ValueError(f"{given} rows of inputs and {wanted} of targets: give as many of one as of the other")
        return tuple(number for number, *_ in everywhere)

    # ---- tied parameters ---------------------------------------------------------------------------------------------

    def _pair(self, first: str, last: str) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        """The two parameters, None for one that another rank has."""
        ends = (self.stages.get(0), first), (self.stages.get(self.program.stages - 1), last)
        a, b = (None if stage is None else stage.get_parameter(name) for stage, name in ends)
        return a, b

    def _share(self, pair: tuple[nn.Parameter | None, nn.Parameter | None]) -> None:
        """The last stage takes the first's values."""
        first, last = pair
        if first is not None and last is not None:
            last.data.copy_(first.data)
        elif first is not None:
            self.comm.send(first.data, self.last)
        elif last is not None:
            self.comm.recv(last.data, self.first)

    def _add_gradients(self, pair: tuple[nn.Parameter | None, nn.Parameter | None]) -> None:
        """Both get the sum of the two gradients."""
        first, last = pair
        if first is last:
            return  # one parameter, or not on this rank
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in pair if p is not None]
        if len(mine) == 1:
            peer = self.last if first is not None else self.first
            theirs = torch.empty_like(mine[0])
            sent, received = self.comm.isend(mine[0], peer), self.comm.irecv(theirs, peer)
            received.wait()
            sent.wait()
            mine.append(theirs)
        for parameter in pair:
            if parameter is not None:
                parameter.grad = mine[0] + mine[1]


class _Run:
    """One step under way on this rank: the tensors that are here, by their names."""

    def __init__(
        self,
        pipeline: PipelineParallel,
        program: Program,
        mail: Mail,
        data: Sequence[tuple[Tensor, ...]],
        answers: Sequence[tuple[Tensor, float]],
    ) -> None:
        self.pipeline, self.mail, self.answers, self.stages = pipeline, mail, answers, program.stages
        self.here: dict[Name, Any] = {Name("x", 0, m): list(tensors) for m, tensors in enumerate(data)}
        self.loss = torch.zeros((), dtype=torch.float64, device=pipeline.comm.device)
        self.spans: list[Span] = []

    def do(self, action: Action) -> None:
        """Have what the action reads, carry it out, and pass on what it wrote."""
        values = [self.take(name) for name in reads(action, self.stages)]
        carry_out = {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}
        comm, start = self.pipeline.comm, monotonic()
        with comm.compute(action, seconds=self.pipeline.modelled(action.kind)):
            made = carry_out[action.kind](action, *values)
        self.spans.append(Span(comm.ranks[comm.rank], action, start, monotonic()))
        for name in writes(action, self.stages):
            self.here[name] = made[name.role]
            if name in self.mail.to:
                self.mail.send(name, self.here.pop(name))

    def take(self, name: Name) -> Any:
        """What is called so; from now on whoever asked has it alone."""
        return self.mail.receive(name) if name in self.mail.source else self.here.pop(name)

    def forward(self, action: Action, received: list[Tensor]) -> dict[str, Any]:
        """x -> x of the next stage, and act: what came in and what went out, for as long as backward needs it."""
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in received]
        out = self.pipeline.stages[action.stage](*inputs)
        if action.stage == self.stages - 1:
            loss = self.weighted_loss(out, action.microbatch)
            self.loss += loss.detach()
            return {"act": (inputs, [loss])}
        outputs = [out] if isinstance(out, Tensor) else list(out)
        if wrong := [type(x).__name__ for x in outputs if not isinstance(x, Tensor)]:
            raise TypeError(f"stage {action.stage} returned a {wrong[0]}: a stage returns a tensor, or several")
        # A buffer may be changed before the message has left.
        buffers = {buffer.untyped_storage().data_ptr() for buffer in self.pipeline.stages[action.stage].buffers()}
        outputs = [x.clone() if x.untyped_storage().data_ptr() in buffers else x for x in outputs]
        return {"x": outputs, "act": (inputs, outputs)}

    def weighted_loss(self, out: Any, microbatch: int) -> Tensor:
        target, share = self.answers[microbatch]
        if share == 0:  # the mean of nothing is NaN
            return torch.stack([x.flatten()[:0].sum() for x in tensors_in(out) if x.is_floating_point()]).sum()
        return self.pipeline.loss_fn(out, target) * share

    def backward(self, action: Action, act: Any, grads: list[Tensor] | None = None) -> dict[str, Any]:
        """The gradient of what came in, and that of the weights into their `grad`."""
        ends = self.ends(act, grads)
        return {"g": dense(backward(*ends), ends[2])}

    def input_gradient(self, action: Action, act: Any, grads: list[Tensor] | None = None) -> dict[str, Any]:
        """The gradient of what came in; the weights' is left for later."""
        ends = self.ends(act, grads)
        found, weights = input_gradient(*ends)
        return {"g": dense(found, ends[2]), "wctx": weights}

    def weight_gradient(self, action: Action, wctx: Weights) -> dict[str, Any]:
        """What was left."""
        wctx.run()
        return {}

    def ends(self, act: Any, grads: list[Tensor] | None) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Outputs that have a gradient, these gradients, and inputs that want one."""
        inputs, outputs = act
        outputs = [out for out in outputs if out.requires_grad]
        if grads is None:
            grads = [torch.ones_like(out) for out in outputs]
        return outputs, grads, [x for x in inputs if x.requires_grad]


def dense(grads: Grads, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of these inputs, zeros for one that was not used."""
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, inputs, strict=True)]


def tied_in(stage: nn.Module) -> Sequence[tuple[str, str]]:
    """What a stage says of parameters that the first and the last stage share.

    Raises: ValueError where it is wrapped: its parameters go by other names then, and each wrapper would treat its own.
    """
    for name, module in stage.named_modules():
        if pairs := getattr(module, "tied", None):
            if name:
                raise ValueError(
                    f"this stage has tied parameters ({pairs[0][0]}, {pairs[0][1]}) and is wrapped: give "
                    "PipelineParallel the stage itself, and call md.average_gradients after `step`"
                )
            return pairs
    return ()


def valid(targets: Tensor) -> int:
    """How many items a mean over these targets is over: those that are not -100, or rows of what are no whole numbers.

    >>> valid(torch.tensor([[1, -100], [2, 3]])), valid(torch.zeros(4, 3))
    (3, 4)
    """
    return len(targets) if targets.is_floating_point() else int((targets != IGNORE).sum())
