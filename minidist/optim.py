"""SGD and AdamW: the update of one tensor as a plain function, and a class around it that is used like torch's.

The functions work in place on anything of one shape, so also on a flat shard of many parameters. They equal torch's to
the last bit: its default on CPU in any dtype, and foreach=True there in float32 and float64. fused=True rounds
differently.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def sgd_(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """One step of SGD, in place: b <- momentum b + g, p <- p - lr b; for Nesterov p <- p - lr (g + momentum b).

    param, grad, momentum_buffer: one shape. The buffer, zeros before the first step, is needed for momentum only.
    weight_decay adds its multiple of p to g. Sutskever et al., ICML 2013, as torch states it.

    >>> p = torch.tensor([1.0])
    >>> sgd_(p, torch.tensor([2.0]), lr=0.25)
    >>> p
    tensor([0.5000])
    """
    if weight_decay:
        grad = grad.add(param, alpha=weight_decay)
    if momentum and momentum_buffer is None:
        raise ValueError(f"momentum={momentum} needs a momentum_buffer, zeros before the first step")
    if momentum and momentum_buffer is not None:
        momentum_buffer.mul_(momentum).add_(grad)
        grad = grad.add(momentum_buffer, alpha=momentum) if nesterov else momentum_buffer
    param.add_(grad, alpha=-lr)


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """One step of AdamW, in place: Adam's with the weight decay outside of the moments (arXiv 1711.05101, algorithm 2).

    param, grad, exp_avg, exp_avg_sq: one shape; the moments m and v are zeros before the first step. step: this one's
    number, from 1.

    >>> p, m, v = torch.tensor([1.0]), torch.zeros(1), torch.zeros(1)
    >>> adamw_(p, torch.tensor([5.0]), m, v, step=1, lr=0.25, weight_decay=0.0)
    >>> p
    tensor([0.7500])
    """
    beta1, beta2 = betas
    if weight_decay:
        param.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)  # m <- beta1 m + (1 - beta1) g
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)  # v <- beta2 v + (1 - beta2) g^2
    # The moments start at zero, so they are too small at first, by 1 - beta^step. One temporary tensor, reused.
    denominator = exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


class _Optimizer(torch.optim.Optimizer):
    """What both classes share. It is torch's class, so that torch's learning-rate schedulers accept it.

    zero_grad and add_param_group are our own because torch's import its compiler at the first call, which takes
    seconds, and every rank is a new process.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], **defaults: Any) -> None:
        for name in ("lr", "weight_decay", "eps"):
            if not defaults.get(name, 0.0) >= 0:
                raise ValueError(f"{name}={defaults[name]} must be at least 0")
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds {"params": [tensors], and any setting that differs from the defaults}."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        if strange := [type(param).__name__ for param in params if not isinstance(param, Tensor)]:
            raise TypeError(f"params must be tensors, and holds a {strange[0]}: pass module.parameters()")
        known = {id(param) for group in self.param_groups for param in group["params"]}
        if len({id(param) for param in params} | known) < len(params) + len(known):
            raise ValueError("a parameter is listed twice; it would be updated twice")
        if strangers := param_group.keys() - self.defaults.keys() - {"params"}:
            raise ValueError(f"unknown settings {sorted(strangers)}: these are {sorted(self.defaults)}")
        self.param_groups.append({**self.defaults, **param_group, "params": params})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, or sets them to zero in place."""
        for group in self.param_groups:
            for param in group["params"]:
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.detach_().zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. closure, if given, computes the loss anew, and is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, self.state[param], group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class SGD(_Optimizer):
    """`sgd_` on every parameter; settings and state as torch.optim.SGD names them."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if momentum < 0 or (nesterov and momentum == 0):
            raise ValueError(f"momentum={momentum} must be at least 0, and more for nesterov")
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group["momentum"] and state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(grad)
        settings = {name: group[name] for name in ("lr", "momentum", "weight_decay", "nesterov")}
        sgd_(param, grad, state.get("momentum_buffer"), **settings)


class AdamW(_Optimizer):
    """`adamw_` on every parameter; settings and state as torch.optim.AdamW names them."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas} must be at least 0 and below 1")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        state["step"] = step = int(state["step"]) + 1  # a state loaded from torch has it as a tensor
        settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        adamw_(param, grad, state["exp_avg"], state["exp_avg_sq"], step, **settings)
