"""``plimsoll plan`` and ``plimsoll fit`` for programs and notebooks: what a job will hold, before it starts.

The program plans, and this module hands it what a Python program has: configurations as objects, models, dictionaries.
It needs neither torch nor transformers: it asks objects for their own ``to_dict``.
"""

import html
import json
import os
import re
import subprocess
import tempfile
import warnings
from typing import Any, Dict, List, Mapping, NoReturn, Optional, Tuple

from plimsoll.errors import PlimsollError
from plimsoll.service import find_program

_ANSWERS = (0, 3)  # it fits, and it does not
_FORMATS = ("explain", "format", "help", "json", "markdown", "table")  # they change what the program prints
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flash_attention_2": "flash", "flash_attention_3": "flash"}
# Keywords that say which of a model's parameters are trained.
_TRAINED = ("adapter", "lora", "freeze", "training_args", "config", "quantization")
_MACHINE = ("gpu", "gpus", "gpu_memory", "machine")


def plan(model: Any = None, *configs: Any, **flags: Any) -> "Plan":
    """Plans a job, as ``plimsoll plan`` does, and starts nothing.

    ``model`` is what ``--model`` takes (a name of the catalog or the Hugging Face hub, a path), or a configuration or model
    of transformers. What a model object says of itself counts where no keyword does: the dtype of its parameters, its
    attention, activation checkpointing and PEFT's adapter. A model on torch's meta device does as well as a loaded one.

    ``configs`` are files that the program recognizes by their content. Every keyword is a flag of ``plimsoll plan``, with
    ``_`` for ``-``. Where a flag takes a file, the keyword also takes a dictionary, or an object with ``to_dict``:
    ``deepspeed=ds_config``, ``training_args=TrainingArguments(...)``, ``adapter=LoraConfig(...)``,
    ``quantization=BitsAndBytesConfig(...)``. ``True`` gives a flag without a value, and ``None`` leaves it out.

    Raises :class:`PlimsollError` with the program's own words, and TypeError for a keyword that is no flag.
    """
    return Plan(_ask("plan", model, configs, flags))


def fit(model: Any = None, *configs: Any, **flags: Any) -> "Fit":
    """Searches for the fastest recipe that fits, as ``plimsoll fit`` does. It takes what :func:`plan` takes."""
    return Fit(_ask("fit", model, configs, flags))


class _Answer:
    """A document of the program."""

    def __init__(self, document: Dict[str, Any]):
        self._document = document

    def to_dict(self) -> Dict[str, Any]:
        """The whole document, as ``--json`` prints it."""
        return self._document


class Plan(_Answer):
    """The answer of :func:`plan`."""

    @property
    def verdict(self) -> str:
        """``"fits"``, ``"tight"``, ``"does not fit"``, or what the program says where it knows no capacity."""
        return self._document["verdict"]

    @property
    def fits(self) -> bool:
        """Whether the job fits, also at the upper end of the interval."""
        return self.verdict == "fits"

    @property
    def devices(self) -> List[Dict[str, Any]]:
        """GPUs and hosts, one for each kind of rank, with their phases and components."""
        return self._document["devices"]

    @property
    def peak(self) -> int:
        """Bytes at the peak of the fullest GPU; of the fullest host, where the job has no GPU."""
        gpus = [d for d in self.devices if d["kind"] == "gpu"]
        return max(phase["peak_used_bytes"] for d in gpus or self.devices for phase in d["phases"])

    @property
    def advice(self) -> List[Dict[str, Any]]:
        """Edits that would mend the job, the best first. Each of them was planned."""
        return self._document.get("advice") or []

    def __repr__(self) -> str:
        job = self._document["job"]
        named = f"{self._document['model']['name']}, {job['engine']}"
        return "\n".join([f"<plimsoll.Plan of {named}>", self._sentence(), *map(_advised, self.advice)])

    def _sentence(self) -> str:
        limit = self._document.get("limit")
        if not limit:
            return f"{self.verdict}: {_size(self.peak)} at the peak"
        place = "GPU" if limit["device"] == "gpu" else limit["device"]
        when = f"{limit['iteration']} {limit['phase']}" if limit.get("iteration") else limit["phase"]
        text = f"{self.verdict}: {_size(limit['needed_bytes'])} of {_size(limit['capacity_bytes'])} on the {place}, {when}"
        if not limit.get("upper_bytes"):
            return text
        return f"{text}; 90 %: {_size(limit['lower_bytes'])} to {_size(limit['upper_bytes'])}"

    def _repr_html_(self) -> str:
        with tempfile.TemporaryDirectory(prefix="plimsoll-") as folder:
            place = os.path.join(folder, "plan.json")
            with open(place, "w", encoding="utf-8") as file:
                json.dump(self._document, file)
            page = _run(["export", "--to", "html", place], folder)
        return f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: 40em; border: 0"></iframe>'


class Fit(_Answer):
    """The answer of :func:`fit`."""

    @property
    def fastest(self) -> Optional[Dict[str, Any]]:
        """The fastest recipe that fits, or None."""
        return self._document.get("fastest")

    @property
    def front(self) -> List[Dict[str, Any]]:
        """Recipes that no other beats in memory and in time."""
        return self._document.get("front") or []

    def __repr__(self) -> str:
        return f"<plimsoll.Fit: {json.dumps(self.fastest, indent=2) if self.fastest else 'no recipe fits'}>"


def _size(count: int) -> str:
    return f"{count / (1 << 30):.3g} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.3g} MiB"


def _advised(advice: Dict[str, Any]) -> str:
    edits = [f"{e['file']}:{e['line']}: {e['key']} {e['from']} -> {e['to']}" for e in advice["edits"]]
    frees = _size(advice["before_bytes"] - advice["after_bytes"])
    return f"{', '.join([*edits, *advice['flags']])} frees {frees}: {advice['verdict']}"


def _ask(verb: str, model: Any, configs: Tuple[Any, ...], flags: Dict[str, Any]) -> Dict[str, Any]:
    for name in _FORMATS:
        if name in flags:
            raise TypeError(f"{verb}() takes no keyword {name!r}: it always asks for JSON, which to_dict() returns")
    flags = dict(flags)
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as folder:
        arguments = [verb, "--json"]
        if model is not None:
            arguments.append("--model=" + _model(model, folder, flags))
        for name, value in flags.items():
            arguments += _flag(name, value, flags, folder)
        arguments += [f"--config={_value(f'config-{i}', c, folder)}" for i, c in enumerate(configs, 1)]
        return json.loads(_run(arguments, folder))


def _run(arguments: List[str], folder: str) -> str:
    """What the program prints. The folder is this module's own, so the caller reads names of files without it."""
    program = subprocess.run([find_program(), *arguments], capture_output=True, encoding="utf-8", check=False)
    complaint = program.stderr.replace(folder + os.sep, "").strip()
    if program.returncode not in _ANSWERS:
        _refuse(arguments[0], complaint or f"{program.args[0]} has ended with code {program.returncode}")
    if complaint:
        warnings.warn(complaint, stacklevel=5)
    return program.stdout.replace(folder + os.sep, "")


def _refuse(verb: str, complaint: str) -> NoReturn:
    complaint = re.sub("^plimsoll: ", "", complaint)
    unknown = re.match(r"unknown flag: --(\S+)", complaint)
    if not unknown:
        raise PlimsollError(complaint)
    meant = re.search(r"did you mean --([a-z-]+)", complaint)
    hint = f"did you mean {meant[1].replace('-', '_')}?" if meant else f"keywords are the flags of plimsoll {verb} --help"
    raise TypeError(f"{verb}() got an unexpected keyword {unknown[1].replace('-', '_')!r}: {hint}")


def _flag(name: str, value: Any, flags: Dict[str, Any], folder: str) -> List[str]:
    if value is None:
        return []
    flag = "--" + name.replace("_", "-")
    if name == "training_args" and hasattr(value, "to_dict"):
        value = value.to_dict()
        # Where there is no GPU, TrainingArguments takes use_cpu=True or refuses bf16. The job is for another machine.
        if any(flags.get(machine) for machine in _MACHINE):
            value["use_cpu"] = False
    if name == "config" and isinstance(value, (list, tuple)):
        return [f"{flag}={_value(f'{name}-{i}', each, folder)}" for i, each in enumerate(value, 1)]
    return [f"{flag}={_value(name, value, folder)}"]


def _value(name: str, value: Any, folder: str) -> str:
    """A value as the program's command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if hasattr(value, "model_type") and hasattr(value, "to_dict"):
        return _write(os.path.join(folder, name, "config.json"), value.to_dict())
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return _write(os.path.join(folder, name + ".json"), value)
    if isinstance(value, (list, tuple, set)):
        return ",".join(str(v) for v in value)
    if isinstance(value, (str, os.PathLike, int, float)) or str(value).startswith("torch."):
        text = str(value)
        return _PRECISIONS.get(text.replace("torch.", "", 1), text)
    raise TypeError(
        f"{name}= is a {type(value).__name__}: expected a text, a number, a path, a dictionary, or an object with to_dict"
    )


def _write(place: str, document: Mapping[str, Any]) -> str:
    os.makedirs(os.path.dirname(place), exist_ok=True)
    with open(place, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=2, default=_plain)
    return place


def _plain(value: Any) -> Any:
    """What JSON has no word for: PEFT's sets, torch's dtypes, and configurations within others."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return str(value).replace("torch.", "", 1)


def _model(model: Any, folder: str, flags: Dict[str, Any]) -> str:
    """The value of --model. What a model object says of itself joins the flags that the caller has left open."""
    if isinstance(model, (str, os.PathLike)):
        return str(model)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        if flags.get("adapter") is None and flags.get("lora") is None:
            flags["adapter"] = model.peft_config[model.active_adapter]
            flags.setdefault("adapter_precision", _dtype(p for n, p in model.named_parameters() if "lora_" in n))
        model = model.get_base_model()
    attention = _ATTENTION.get(getattr(getattr(model, "config", model), "_attn_implementation", None) or "")
    if attention and flags.get("attention") is None:
        flags["attention"] = attention
    if hasattr(model, "named_parameters"):
        return _write(os.path.join(folder, "model", "config.json"), _described(model, flags))
    if isinstance(model, Mapping):
        return _write(os.path.join(folder, "model", "config.json"), model)
    if not (hasattr(model, "to_dict") and hasattr(model, "model_type")):
        raise TypeError(f"model is a {type(model).__name__}: expected a name, a path, or a configuration or model of transformers")
    return _value("model", model, folder)


def _described(model: Any, flags: Dict[str, Any]) -> Dict[str, Any]:
    """The configuration of a model object, with the architecture and the dtype that it has."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise TypeError(f"model is a {type(model).__name__} without a configuration: plan models of transformers, or a config.json")
    _require_trained(model, flags)
    if flags.get("precision") is None:
        precision = _dtype(p for n, p in model.named_parameters() if "lora_" not in n and p.is_floating_point())
        if precision != "fp32":  # fp32 parameters may come under the autocast that a file asks for
            flags["precision"] = precision
    if flags.get("gradient_checkpointing") is None:
        flags["gradient_checkpointing"] = _checkpointing(model)
    ours = (c.__name__ for c in type(model).__mro__ if c.__module__.startswith("transformers.models."))
    return {**config.to_dict(), "architectures": [next(ours, type(model).__name__)], "dtype": "float32"}


def _dtype(parameters: Any) -> Optional[str]:
    found = sorted({str(p.dtype).replace("torch.", "") for p in parameters})
    if len(found) > 1:
        raise PlimsollError(
            f"the parameters of the model are in {' and '.join(found)}: say which one to plan, as precision=\"bf16\""
        )
    return _PRECISIONS.get(found[0], found[0]) if found else None


def _require_trained(model: Any, flags: Dict[str, Any]) -> None:
    """A plan trains every parameter, but for what flags and files say."""
    if any(flags.get(name) is not None for name in _TRAINED):
        return
    parameters = list(model.parameters())
    frozen = sum(not p.requires_grad for p in parameters)
    if frozen:
        raise PlimsollError(
            f"{frozen} of the {len(parameters)} parameters of the model are not trained (requires_grad): say what is, with "
            'lora=, adapter= or freeze="vision", or give the configuration (model.config) to plan all of them'
        )


def _checkpointing(model: Any) -> Optional[str]:
    """What activation_checkpointing_enable has set, in the words of --gradient-checkpointing."""
    checkpointed = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    if not checkpointed:
        return None
    options = getattr(getattr(checkpointed[0], "_gradient_checkpointing_func", None), "keywords", {})
    return "reentrant" if options.get("use_reentrant") else "full"
