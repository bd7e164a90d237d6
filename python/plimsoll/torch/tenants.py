"""Optimizer states of many adapters, which one model trains in turns: :class:`Tenants`."""

import os
import re
import shutil
from collections import OrderedDict
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from plimsoll.errors import ServiceError
from plimsoll.protocol import Opened
from plimsoll.torch import layout
from plimsoll.torch.optimizer import Optimizer
from plimsoll.torch.shards import Shards

#: Options of an optimizer that tenants set, or that need the parameters of the model itself.
_OWN = ("name", "gradients", "named_parameters", "model", "sharding", "process_group", "overlap", "delta", "tier", "memory")

_STEP = re.compile(r"step-(\d+)")  # the folder of a checkpoint


class Tenants:
    """Optimizer states of many adapters, which are trained in turns with one model.

    ``optimizer`` is a class of this package, and ``options`` are its arguments. ``params`` are the parameters that all
    tenants train, such as those of one LoRA adapter: each tenant has values and states of its own for them. A new tenant
    begins with the values that they have now.

    :meth:`switch` gives the model a tenant's values. At most ``resident`` tenants are in memory, all where it is not
    given. The others are in ``folder``: before a state is given back, it is saved there, that of the tenant which was
    not used for the longest. So it is where the service says that another state does not fit.

    States outlive the trainer as those of any optimizer do. The folder outlives the host: a tenant goes on from what was
    saved last.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        optimizer: Callable[..., Optimizer],
        named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
        folder: Any = None,
        resident: Optional[int] = None,
        **options: Any,
    ):
        taken = sorted(set(_OWN) & set(options))
        if taken:
            raise TypeError(f"Tenants takes no {', '.join(taken)}: its parameters are trained by one process, in turns")
        if resident is not None and resident < 1:
            raise ValueError(f"resident is {resident}: expected 1 or more tenants in memory, or None for all")
        if resident is not None and folder is None:
            raise ValueError(f"resident is {resident}, and there is no folder: give the folder that the other tenants go to")
        self._groups = _groups_of(params)
        self._parameters = [p for group in self._groups for p in group["params"]]
        self._check_parameters()
        names = layout.names_of(self._groups, named_parameters, None)
        self._names = [names[p] for p in self._parameters]
        self._make, self._options = optimizer, options
        self._folder, self._most = folder and os.path.abspath(folder), resident
        self._initial = [p.detach().to("cpu", copy=True) for p in self._parameters]
        self._resident: "OrderedDict[str, Tenant]" = OrderedDict()  # those used last are last
        #: The tenant whose values the model has, or None.
        self.active: Optional[Tenant] = None

    def _check_parameters(self) -> None:
        if not self._parameters:
            raise ValueError("there are no parameters: give those that the tenants train")
        for p in self._parameters:
            if not p.requires_grad or layout.is_sharded(p):
                raise ValueError("Tenants trains whole parameters that require gradients: leave out those that are frozen or sharded")

    @property
    def resident(self) -> Tuple[str, ...]:
        """The names of the tenants that this program has in memory. The one used last is last."""
        return tuple(self._resident)

    def saved(self) -> List[str]:
        """The names of the tenants that are in the folder, in memory or not."""
        if self._folder is None or not os.path.isdir(self._folder):
            return []
        return sorted(name for name in os.listdir(self._folder) if self._saved_step(name) is not None)

    def switch(self, name: str) -> "Tenant":
        """Gives the model the values of a tenant, which is made if there is none of that name. Returns the tenant.

        Raises RuntimeError if the model has gradients, which are of the tenant before. Where it raises anything, the
        model keeps the tenant before.
        """
        if self.active is not None and self.active.name == name:
            return self.active
        if any(p.grad is not None for p in self._parameters):
            of = f"of tenant {self.active.name}" if self.active is not None else "of no tenant"
            raise RuntimeError(f"the model has gradients {of}: make the step and zero_grad() before another tenant is trained")
        tenant = self._resident.get(name) or self._bring(name)
        if self.active is not None:
            self.active._take()
        tenant._put()
        self._resident.move_to_end(name)
        self.active = tenant
        return tenant

    def evict(self, name: str) -> None:
        """Saves the state of a tenant in the folder, and gives its memory back."""
        tenant = self._resident[name]
        if self._folder is None:
            raise ValueError("there is no folder to save a tenant in: give Tenants a folder")
        if tenant is self.active:
            raise ValueError(f"tenant {name} is the one that the model has: switch to another before")
        folder = os.path.join(self._folder, name)
        tenant.optimizer.save(folder, training={"groups": [_plain(g) for g in tenant.optimizer.param_groups]})
        saved = tenant.optimizer.saved()
        for other in _steps_in(folder) - {saved}:
            shutil.rmtree(os.path.join(folder, f"step-{other:08d}"))
        self._drop(tenant)

    def remove(self, name: str) -> None:
        """Removes the state of a tenant, in memory and in the folder."""
        if self.active is not None and self.active.name == name:
            raise ValueError(f"tenant {name} is the one that the model has: switch to another before")
        if name in self._resident:
            self._drop(self._resident[name])
        if self._folder is not None:
            shutil.rmtree(os.path.join(self._folder, _checked(name)), ignore_errors=True)

    def close(self, *, give_back: bool = False) -> None:
        """Ends the sessions of all tenants. States stay in a service that is not this process's own, unless they are
        given back. The model keeps its values.
        """
        if self.active is not None:
            self.active._take()
        for tenant in self._resident.values():
            tenant.optimizer.close(give_back=give_back)
        if self.active is not None:
            self.active._put()  # what was a part of shared memory has a copy now
        self._resident.clear()
        self.active = None

    def _drop(self, tenant: "Tenant") -> None:
        tenant.optimizer.close(give_back=True)
        del self._resident[tenant.name]

    def _bring(self, name: str) -> "Tenant":
        """Opens the state of a tenant. Others leave the memory if it has no room."""
        if self._most is not None:
            while len(self._resident) >= self._most and self._evict_oldest():
                pass
        while True:
            tenant = Tenant(self, _checked(name))
            try:
                tenant._open(self._saved_step(name))
            except ServiceError as error:
                if error.status != "does_not_fit" or not self._evict_oldest():
                    raise
                continue
            self._resident[name] = tenant
            return tenant

    def _evict_oldest(self) -> bool:
        """Whether there is a tenant that can leave the memory: then it has left."""
        for tenant in list(self._resident.values()):
            if tenant is not self.active and self._folder is not None:
                self.evict(tenant.name)
                return True
        return False

    def _saved_step(self, name: str) -> Optional[int]:
        """The step that a tenant was saved at last, or None."""
        return max(_steps_in(os.path.join(self._folder, name)), default=None) if self._folder is not None else None


class Tenant:
    """An adapter's values and states: one of :class:`Tenants`."""

    def __init__(self, tenants: Tenants, name: str):
        self.name, self._tenants = name, tenants
        self._values = [torch.nn.Parameter(x.clone()) for x in tenants._initial]
        self._versions: List[int] = []  # of the model's parameters, when they got the values
        values, groups = iter(self._values), []
        for group in tenants._groups:
            groups.append({**group, "params": [next(values) for _ in group["params"]]})
        named = list(zip(tenants._names, self._values))
        #: The optimizer of the tenant. Its parameters are on the host, and have no gradients between two steps.
        self.optimizer = tenants._make(groups, name=name, gradients="step", named_parameters=named, **tenants._options)

    @property
    def resumed_step(self) -> int:
        """The step that the state was at when it was found: 0 for a new one."""
        return self.optimizer.resumed_step

    @property
    def steps(self) -> int:
        """How many steps the state has had."""
        self.optimizer.open()
        return self.optimizer._shards.step

    @property
    def param_groups(self) -> List[Dict[str, Any]]:
        """The groups of the optimizer, with the tenant's learning rates."""
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        """Removes the gradients of the model's parameters."""
        for p in self._tenants._parameters:
            p.grad = None

    def step(self) -> None:
        """Makes a step of the gradients that the model's parameters have. Raises RuntimeError if the model has another
        tenant.
        """
        active = self._tenants.active
        if active is not self:
            has = f"tenant {active.name}" if active is not None else "no tenant"
            raise RuntimeError(f"a step of tenant {self.name}, and the model has {has}: call switch({self.name!r}) before the forward pass")
        self._take()
        try:
            for p, value in zip(self._tenants._parameters, self._values):
                value.grad = p.grad if p.grad is None else p.grad.to(value.device)
            self.optimizer.step()
        finally:
            for value in self._values:
                value.grad = None
        self._put()

    def _open(self, saved: Optional[int]) -> None:
        """Finds the state in the service, or in the folder at the step that was saved, or begins with a new one."""

        def begin(shards: Shards, found: Sequence[Opened]) -> Any:
            # A process may have died after it saved the state, and before all of it was given back; or after it opened a
            # state, and before all of it was loaded.
            if saved is None or all(f.attached and f.step >= saved for f in found):
                return shards.start(list(found))
            return self.optimizer._saver.load(shards, os.path.join(str(self._tenants._folder), self.name))

        training = self.optimizer._open(begin)
        if training is not None:
            for group, options in zip(self.optimizer.param_groups, training["groups"]):
                group.update({k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})

    def _put(self) -> None:
        """Gives the model the values. On the host these are its parameters from now on."""
        self._versions = []
        for p, value in zip(self._tenants._parameters, self._values):
            if p.device == value.device:
                p.data = value.data
            else:
                with torch.no_grad():
                    p.copy_(value)
            self._versions.append(p._version)

    def _take(self) -> None:
        """Takes what the program has changed in the model's parameters."""
        for p, value, version in zip(self._tenants._parameters, self._values, self._versions):
            if p.shape != value.shape or p.dtype != value.dtype:
                raise RuntimeError(
                    f"a parameter of the model is {p.dtype} of shape {tuple(p.shape)}, and the tenants' is {value.dtype} of shape "
                    f"{tuple(value.shape)}: convert the model before Tenants is made"
                )
            if p._version != version or p.device == value.device and p.data_ptr() != value.data_ptr():
                with torch.no_grad():
                    value.copy_(p)


def _groups_of(params: Iterable[Any]) -> List[Dict[str, Any]]:
    groups = list(params)
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    return [{**g, "params": [g["params"]] if isinstance(g["params"], torch.Tensor) else list(g["params"])} for g in groups]


def _checked(name: str) -> str:
    if not re.fullmatch("[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,31}", name):
        raise ValueError(f"the name of a tenant is {name!r}: expected 1 to 32 of a-z A-Z 0-9 . _ -, and no dot at the beginning")
    return name


def _steps_in(folder: str) -> set:
    """The steps of the checkpoints in a folder."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return {int(found.group(1)) for found in map(_STEP.fullmatch, names) if found}


def _plain(group: Dict[str, Any]) -> Dict[str, Any]:
    """The options of a group that JSON has: learning rates and their kin."""
    return {
        k: list(v) if isinstance(v, tuple) else v
        for k, v in group.items()
        if k not in ("params", "param_names") and isinstance(v, (bool, int, float, str, tuple, type(None)))
    }
