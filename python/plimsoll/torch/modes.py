"""Overlaps of updates and training that are not exact: what a program chooses of them."""

import dataclasses
import json
import os
from typing import Any, Dict, NamedTuple, Optional, Union


class Async(NamedTuple):
    """Each update runs during the forward and backward pass of the next step, whose gradients it does not change.

    The first ``warm_up_steps`` steps are exact. The default is that of the paper.
    """

    warm_up_steps: int = 40


@dataclasses.dataclass(frozen=True)
class ZenFlow:
    """Columns with large gradients are updated in every step, all others with the mean gradient of several steps.

    Arguments have the names and defaults of DeepSpeed's section ``zenflow``, but ``overlap_step`` and ``scale_lr``.

    Args:
        topk_ratio: the share of the columns of a matrix that are important. Tensors of other shapes are important.
        select_strategy: "step" selects columns every ``select_interval`` steps, "epoch" every so many epochs, "auto" in
            every epoch.
        select_interval: a number, or "auto" with the strategy "auto".
        update_interval: the steps between two updates of the other columns. "auto" updates them once their
            accumulated gradients have become as large as the mean gradients of important columns.
        full_warm_up_rounds: the first steps, which are exact.
        overlap_step: whether the update of the other columns goes on behind the next forward and backward pass.
        steps_per_epoch: for "auto" and "epoch". Without it columns are selected once.
        scale_lr: whether an update of the other columns, which stands for several steps, takes their number times the
            learning rate, as for larger batches (arXiv 1706.02677). DeepSpeed does not.
        auto_ratio: the share of matrices that must be due for an update, with an update_interval of "auto".
    """

    topk_ratio: float = 0.1
    select_strategy: str = "auto"
    select_interval: Union[str, int] = "auto"
    update_interval: Union[str, int] = "auto"
    full_warm_up_rounds: int = 0
    overlap_step: bool = True
    steps_per_epoch: Optional[int] = None
    auto_ratio: float = 0.99
    scale_lr: bool = True

    def __post_init__(self) -> None:
        _check("topk_ratio", self.topk_ratio, _is_number(self.topk_ratio) and 0 < self.topk_ratio < 1, "a number between 0 and 1")
        is_known = self.select_strategy in ("auto", "step", "epoch")
        _check("select_strategy", self.select_strategy, is_known, "'auto', 'step' or 'epoch'")
        for name in ("select_interval", "update_interval"):
            value = getattr(self, name)
            _check(name, value, value == "auto" or _is_count(value, 1), "'auto' or a whole number from 1 on")
        if (self.select_strategy == "auto") != (self.select_interval == "auto"):
            expected = "'auto', as select_strategy is" if self.select_strategy == "auto" else "a number, as select_strategy is not 'auto'"
            _check("select_interval", self.select_interval, False, expected)
        _check("full_warm_up_rounds", self.full_warm_up_rounds, _is_count(self.full_warm_up_rounds, 0), "a whole number")
        _check("overlap_step", self.overlap_step, isinstance(self.overlap_step, bool), "True or False")
        _check("scale_lr", self.scale_lr, isinstance(self.scale_lr, bool), "True or False")
        has_epoch = self.steps_per_epoch is None or _is_count(self.steps_per_epoch, 1)
        _check("steps_per_epoch", self.steps_per_epoch, has_epoch, "None or a whole number from 1 on")
        _check("auto_ratio", self.auto_ratio, _is_number(self.auto_ratio) and 0 <= self.auto_ratio <= 1, "0 to 1")
        if self.update_interval != "auto" and 0 < self.selects_every < self.update_interval:
            raise ValueError(
                f"columns are selected every {self.selects_every} steps, and update_interval is {self.update_interval}: expected a selection "
                "no more often than an update; give a larger select_interval, or a smaller update_interval"
            )

    @property
    def selects_every(self) -> int:
        """The steps between two selections, 0 for a single one."""
        if self.select_strategy == "step":
            return self.select_interval
        return (self.steps_per_epoch or 0) * (1 if self.select_interval == "auto" else self.select_interval)

    @classmethod
    def from_deepspeed(cls, config: Union[Dict[str, Any], str, "os.PathLike[str]"], steps_per_epoch: Optional[int] = None) -> "ZenFlow":
        """The section ``zero_optimization.zenflow`` of DeepSpeed's configuration: a dict, or the path of its file.

        ``steps_per_epoch`` is the length of the data loader, which DeepSpeed finds out itself. Raises ValueError for
        what is different here.
        """
        if not isinstance(config, dict):
            with open(config, encoding="utf-8") as file:
                config = json.load(file)
        section = config.get("zero_optimization", {}).get("zenflow")
        if not isinstance(section, dict):
            raise ValueError(f"zero_optimization.zenflow is {section!r}: expected a section, as in a configuration for ZenFlow")
        given = dict(section)
        if not given.pop("offload", True):
            raise ValueError(
                "zero_optimization.zenflow.offload is false: the moments of important columns are in host memory here; set it to "
                "true, or remove it"
            )
        for key, reason in _REFUSED.items():
            if key in given:
                raise ValueError(f"zero_optimization.zenflow.{key} is {given[key]!r}: {reason}; remove it")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(f"zero_optimization.zenflow has {', '.join(unknown)}: expected some of {', '.join(sorted(known))}")
        try:
            return cls(**{"overlap_step": False, "steps_per_epoch": steps_per_epoch, **given})
        except ValueError as error:
            raise ValueError(f"zero_optimization.zenflow: {error}") from None


_REFUSED = {
    "pt_reserved_cores_perc": "plimsoll run and plimsoll serve divide the cores between trainer and service",
    "steps_per_epoch": "DeepSpeed takes it from the data loader; give it to from_deepspeed",
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}: expected {expected}")
