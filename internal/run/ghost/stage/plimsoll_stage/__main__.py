"""Runs a program: ``python -m plimsoll_stage PROGRAM ARGUMENTS...``, as one rank of its job.

The settings come from the environment, by names that begin with PLIMSOLL_STAGE. They and the library that stands in for
CUDA are taken out of it at once: of the processes that the program starts, programs of Python alone are on the stage.
"""

import json
import os
import sys


def main() -> int:
    settings = json.loads(os.environ.pop("PLIMSOLL_STAGE"))
    staged = {name: os.environ[name] for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH")}
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        os.environ.pop(name, None)
        if settings["environment"].get(name):
            os.environ[name] = settings["environment"][name]
    from plimsoll_stage import data, host, imports, launchers, operators, record, values, weights, world, writes

    writes.make_caches(settings)
    os.environ.update(settings["set"])
    recorder = record.Recorder(settings)
    recorder.keep(host.be_watched(settings))
    writes.guard(settings, recorder)
    launchers.follow(settings, staged)

    def on_torch(torch):
        values.install(torch, recorder)
        writes.keep_nothing(torch, recorder)
        weights.install_hub(torch, recorder)
        recorder.install(torch)

    imports.after("torch", on_torch)
    imports.after("torch.distributed", lambda module: world.install(module, settings, recorder))
    imports.after("torch.multiprocessing", lambda module: launchers.spawn_one(module, settings))
    imports.after("torch._dynamo.trace_rules", record.compile_nothing)
    imports.after("deepspeed.runtime.zero.utils", world.agree)
    imports.after("deepspeed.ops.op_builder.builder", lambda module: operators.install(module, recorder))
    imports.after("filelock", writes.lock_nothing)
    imports.after("triton.backends.nvidia.compiler", operators.assemble_nothing)
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):
        imports.after(name, operators.key_nothing)
    imports.after("triton.runtime.autotuner", operators.tune_nothing)
    imports.after("torch._inductor.runtime.triton_heuristics", operators.compile_first)
    imports.after("torch._inductor.select_algorithm", operators.choose_first)
    imports.after("safetensors.torch", lambda module: writes.save_nothing(module, recorder))
    imports.after("transformers.tokenization_utils_base", lambda module: writes.save_no_tokenizer(module, recorder))
    imports.after("transformers.modeling_utils", lambda module: weights.install(module, settings, recorder))
    imports.after("datasets", lambda module: data.install_datasets(module, settings, recorder))
    for name in ("tokenization_utils_base", "models.auto.tokenization_auto"):
        imports.after(f"transformers.{name}", lambda module: data.install_tokenizers(module, settings, recorder))
    imports.after("diffusers.models.modeling_utils", lambda module: weights.install_diffusers(module, settings, recorder))
    imports.after("timm.models._builder", lambda module: weights.install_timm(module, recorder))
    return recorder.run(lambda: launchers.run(sys.argv[1:], settings))


if __name__ == "__main__":
    sys.exit(main())
