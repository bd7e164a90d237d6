"""The arguments of optimizers: what each is and does."""

import inspect
import os
import textwrap
from typing import Any, Dict, Iterable, Literal, Optional, Sequence, Tuple, Type, Union

import torch

from plimsoll.torch.modes import Async, ZenFlow

Parameters = Union[Iterable[torch.Tensor], Iterable[Dict[str, Any]], Iterable[Tuple[str, torch.Tensor]]]
Number = Union[float, torch.Tensor]
StateFormat = Literal["split", "fp32", "split24"]
Moments = Literal["fp32", "bf16"]
MomentsOfAdam = Literal["fp32", "bf16", "int8"]
Sharding = Optional[Literal["zero1", "zero2", "local"]]
Gradients = Literal["backward", "step"]
Overlap = Union[None, Literal["forward", "backward", "async"], Async, ZenFlow]
MissingGradients = Literal["keep", "zero", "refuse"]
Path = Union[str, "os.PathLike[str]"]
Tier = Union[None, Path, Sequence[Path]]

_IGNORED = "chooses among torch's implementations. It is accepted and changes nothing: the service has one."

_MEANINGS = {
    "params": "parameters, (name, parameter) pairs, or dicts that are parameter groups.",
    "lr": "the learning rate. A tensor has one element, and is read at each step.",
    "betas": "how much of the averages of the gradient and of its square stays in a step.",
    "eps": "is added to the denominator: 0, or at least 1.2e-38.",
    "weight_decay": "is added to the gradient, times the weight.",
    "amsgrad": "False. True is a ValueError: it needs a third moment, and the service holds two.",
    "maximize": "makes the objective larger. All parameter groups agree on it.",
    "foreach": _IGNORED,
    "fused": _IGNORED,
    "capturable": f"{_IGNORED} A step cannot be captured in a CUDA graph, and raises then.",
    "differentiable": "False. True is a ValueError: autograd cannot follow into the service.",
    "decoupled_weight_decay": "True makes Adam an AdamW. All parameter groups agree on it.",
    "lr_decay": "the learning rate of step n is lr / (1 + (n - 1) * lr_decay).",
    "initial_accumulator_value": "what the sums of squares begin with.",
    "momentum": "how much of the momentum stays in a step.",
    "dampening": "how much less of a gradient than all of it goes into the momentum.",
    "nesterov": "Nesterov's momentum.",
    "state": (
        'how a bf16 parameter is held. "split": parameter and 16 more bits are the fp32 master weight. "fp32": the master '
        'weight is beside it, 2 bytes more. "split24": parameter and 8 more bits are a master weight of 24 bits, rounded at '
        "random after each step, 1 byte less. fp32 parameters are their own master weights; fp16 ones have theirs beside them."
    ),
    "moments": '"fp32" or "bf16", which takes 2 bytes a parameter less.',
    "max_grad_norm": (
        "clips to this norm of all gradients, as torch.nn.utils.clip_grad_norm_ does. A step whose gradients are not "
        "finite is left out, and counted in ``skipped``."
    ),
    "sharding": (
        'None; "zero1", where each rank of process_group holds a part of the state, and gradients are the same on all ranks '
        '(DistributedDataParallel); "zero2", where the optimizer averages gradients itself, and each rank keeps those of its '
        'part; "local", where each rank has parameters of its own, such as its range of a flat buffer, and the program averages '
        "gradients and gathers weights: the ranks only make their steps together. Parameters that fully_shard has sharded are held "
        "as they are, with None."
    ),
    "process_group": (
        "the ranks among which the state is divided. Without sharding: the ranks that hold copies of one state. Where model "
        "is wrapped by DistributedDataParallel, its ranks do."
    ),
    "missing_gradients": (
        '"keep" leaves a parameter without a gradient alone, as torch does: it keeps its weight and its state, and the step is none '
        'of its own. "zero" counts its gradient as zero: its moments decay, and so does its weight. "refuse" raises. With ZenFlow "keep" '
        "raises, too."
    ),
    "gradients": (
        '"backward" takes each gradient when autograd is through with it. "step" takes all of them in the step, also those '
        "that were written through an address."
    ),
    "overlap": (
        'None: the step returns when the model has its parameters. "forward": it returns when the update has begun, and the '
        "modules of ``model`` wait for their parameters in the next forward pass. A program that reads or writes parameters "
        'elsewhere calls ``synchronize`` first. "backward": the same, and parameters are updated as their gradients become final, '
        'without clipping. "async", or Async(warm_up_steps=...): the update runs during the next forward and '
        "backward pass, whose gradients it does not change. ZenFlow(...): columns with large gradients are updated in every step, "
        "all others with the mean gradient of several steps."
    ),
    "delta": "True has each step note which parameters it changes, for the method ``delta``.",
    "tier": (
        "folders, one on each disk, in whose files the service of this process holds the state: it may be larger than memory, and "
        "outlives the host. A later process with the same job and folders goes on from its last step."
    ),
    "memory": 'for what is between the tier and the updates, such as "512MiB"; "1GiB" where it is not given.',
    "model": "for the names of parameters in checkpoints and messages, and for ``overlap``.",
    "named_parameters": "the same, where there is no model: (name, parameter) pairs.",
    "name": "tells the optimizers of one program apart: each but one needs a name.",
    "job": "of the service; $PLIMSOLL_JOB where it is not given.",
    "socket": (
        "of the service; $PLIMSOLL_SOCKET where it is not given. Without either the process starts a service of its own, with "
        "the program plimsoll that is on PATH, or that $PLIMSOLL names."
    ),
}

_RAISES = (
    "Raises what torch raises for the same arguments. Raises ValueError for numbers that fp32 cannot hold, TypeError for "
    "parameters that are not bfloat16, float16 or float32, and PlimsollError where the program plimsoll is needed "
    "and was not found."
)


def described(**meanings: str) -> Any:
    """A decorator that documents each argument in a class's docstring: from ``meanings``, or else from the common
    meanings.
    """

    def describe(optimizer: Type[Any]) -> Type[Any]:
        lines = [inspect.getdoc(optimizer), "", "Args:"]
        for argument in list(inspect.signature(optimizer).parameters):
            text = f"{argument}: {meanings.get(argument) or _MEANINGS[argument]}"
            lines += textwrap.wrap(text, 110, initial_indent=" " * 4, subsequent_indent=" " * 8)
        optimizer.__doc__ = "\n".join([*lines, "", *textwrap.wrap(_RAISES, 110)])
        return optimizer

    return describe
