"""The parameters that fully_shard (FSDP2) gathers together."""

from typing import Any, Callable, List

import torch

_WAITING = "_plimsoll_before_unshard"  # in a group: what runs before it is gathered


class Group:
    """Parameters that are gathered before a module's forward or backward, by a prefetch, or by ``unshard()``."""

    def __init__(self, group: Any):
        self._group = group

    @property
    def parameters(self) -> List[torch.Tensor]:
        """The shards."""
        return [p.sharded_param for p in self._group.fsdp_params]

    def before_gathering(self, act: Callable[[List[torch.Tensor]], None]) -> "Hook":
        """Has ``act`` called with the parameters, before anything gathers them."""
        waiting = vars(self._group).setdefault(_WAITING, [])
        if not waiting:
            gather = self._group.unshard

            def unshard(*arguments: Any, **named: Any) -> Any:
                for act in list(waiting):
                    act(self.parameters)
                return gather(*arguments, **named)

            self._group.unshard = torch._dynamo.disable(unshard)
        waiting.append(act)
        return Hook(self._group, act)


class Hook:
    def __init__(self, group: Any, act: Callable[[List[torch.Tensor]], None]):
        self._group, self._act = group, act

    def remove(self) -> None:
        waiting = vars(self._group).get(_WAITING, [])
        if self._act in waiting:
            waiting.remove(self._act)
        if not waiting:
            vars(self._group).pop("unshard", None)


def groups_of(model: torch.nn.Module) -> List[Group]:
    """The groups of a model. Those of a torch with another interface are left out."""
    found = {}
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        several = getattr(state, "_fsdp_param_groups", None)  # of recent releases
        for group in [getattr(state, "_fsdp_param_group", None)] if several is None else several:
            if hasattr(group, "unshard") and hasattr(group, "fsdp_params"):
                found[id(group)] = Group(group)
    return list(found.values())
