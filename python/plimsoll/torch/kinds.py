"""The kind of updates that an optimizer's ``overlap`` asks for."""

from typing import Any

from plimsoll.torch.delayed import Delayed
from plimsoll.torch.modes import Async, ZenFlow
from plimsoll.torch.selective import Selective
from plimsoll.torch.settings import Settings
from plimsoll.torch.shards import Shards
from plimsoll.torch.updates import Exact, Updates

_KINDS = {type(None): Exact, Async: Delayed, ZenFlow: Selective}


def updates_for(shards: Shards, settings: Settings, lock: Any) -> Updates:
    return _KINDS[type(settings.overlap)](shards, settings, lock)
