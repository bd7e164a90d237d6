"""plimsoll.plan takes what Python programs have, and answers what ``plimsoll plan`` says of the same job in files."""

import copy
import json
import os
import subprocess
import sys

import peft
import pytest
import torch
import transformers

import plimsoll

CONFIG = transformers.LlamaConfig(
    vocab_size=32000,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
GPU = {"gpu": "RTX-4090", "host_memory": "64GiB"}


def program(*arguments):
    command = [os.environ["PLIMSOLL"], "plan", "--json", "--gpu", "RTX-4090", "--host-memory", "64GiB", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode in (0, 3), answer.stderr
    return json.loads(answer.stdout)


def model(dtype=torch.bfloat16, **options):
    with torch.device("meta"):  # from_config changes its argument
        return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), **options).to(dtype)


def same(plan, document):
    """Both plan the same job; inputs and requests name the files that it was made from."""
    for part in ("verdict", "job", "devices", "limit"):
        assert plan.to_dict()[part] == document[part]
    assert plan.to_dict()["model"]["parameters"] == document["model"]["parameters"]


def saved(folder, document, name):
    (folder / name).write_text(json.dumps(document))
    return str(folder / name)


def test_a_name(tmp_path):
    plan = plimsoll.plan("qwen2.5-7b", precision="bf16", seq_len=1024, **GPU)
    same(plan, program("--model", "qwen2.5-7b", "--precision", "bf16", "--seq-len", "1024"))
    assert plan.verdict == "does not fit" and not plan.fits
    assert plan.peak > 4 * 2 * 7.6e9 and [d["kind"] for d in plan.devices] == ["gpu", "host"]
    small = plimsoll.plan("gpt2", **GPU)
    assert small.fits and small.peak == max(p["peak_used_bytes"] for p in small.devices[0]["phases"])


def test_text_and_html():
    plan = plimsoll.plan("gpt2", **GPU)
    first, sentence = repr(plan).splitlines()[:2]
    assert "gpt2" in first and sentence.startswith("fits: ") and "GiB of 23.6 GiB on the GPU" in sentence
    page = plan._repr_html_()
    assert page.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;') and page.count("<") == 2


@pytest.mark.parametrize("dtype, precision", [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")])
def test_configurations_and_models(tmp_path, dtype, precision):
    CONFIG.save_pretrained(tmp_path)
    named = program("--model", str(tmp_path / "config.json"), "--precision", precision)
    same(plimsoll.plan(CONFIG, precision=dtype, **GPU), named)
    same(plimsoll.plan(tmp_path / "config.json", precision=precision, **GPU), named)
    same(plimsoll.plan(model(dtype), **GPU), named)
    same(plimsoll.plan(model(), precision=precision, **GPU), named)
    assert named["model"]["parameters"] == sum(p.numel() for p in model().parameters())


def test_what_a_model_says_of_itself(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    named = ["--model", str(tmp_path / "config.json"), "--precision", "bf16"]
    eager = model(attn_implementation="eager")
    same(plimsoll.plan(eager, **GPU), program(*named, "--attention", "eager"))
    same(plimsoll.plan(eager.config, precision="bf16", **GPU), program(*named, "--attention", "eager"))
    same(plimsoll.plan(eager, attention="sdpa", **GPU), program(*named))
    for reentrant, words in ((False, "full"), (True, "reentrant")):
        checkpointed = model()
        checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        same(plimsoll.plan(checkpointed, **GPU), program(*named, "--gradient-checkpointing", words))
        same(plimsoll.plan(checkpointed, gradient_checkpointing=False, **GPU), program(*named))
    same(plimsoll.plan(model(), gradient_checkpointing=True, **GPU), program(*named, "--gradient-checkpointing", "full"))
    classifier = transformers.AutoModelForSequenceClassification.from_config(copy.deepcopy(CONFIG))
    planned = plimsoll.plan(classifier, **GPU).to_dict()["model"]
    assert planned["parameters"] == sum(p.numel() for p in classifier.parameters())


def test_deepspeed(tmp_path):
    file = saved(tmp_path, DEEPSPEED, "ds_config.json")
    documents = [program("--model", "gpt2", "--gpus", "2", "--deepspeed", file)]
    same(plimsoll.plan("gpt2", gpus=2, deepspeed=DEEPSPEED, **GPU), documents[0])
    same(plimsoll.plan("gpt2", file, gpus=2, **GPU), documents[0])
    same(plimsoll.plan("gpt2", config=[DEEPSPEED], gpus=2, **GPU), documents[0])


def test_training_arguments(tmp_path):
    """Without a GPU here, TrainingArguments take use_cpu. The job is planned for the GPU that the caller names."""
    options = {"per_device_train_batch_size": 2, "bf16": True, "gradient_checkpointing": True, "optim": "adamw_torch"}
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, **options)
    file = saved(tmp_path, {**arguments.to_dict(), "use_cpu": False}, "training_args.json")
    named = program("--model", "gpt2", "--training-args", file)
    assert named["job"]["micro_batch"] == 2 and named["job"]["autocast_dtype"] == "bf16"
    same(plimsoll.plan("gpt2", training_args=arguments, **GPU), named)
    fp32 = model(torch.float32)
    assert plimsoll.plan(fp32, training_args=arguments, **GPU).to_dict()["job"]["autocast_dtype"] == "bf16"


def test_adapters(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    lora.save_pretrained(tmp_path)
    named = ["--model", str(tmp_path / "config.json"), "--precision", "bf16", "--adapter", str(tmp_path / "adapter_config.json")]
    same(plimsoll.plan(CONFIG, precision="bf16", adapter=lora, **GPU), program(*named))
    base = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG)).to(torch.bfloat16)
    adapted = peft.get_peft_model(base, lora)
    plan = plimsoll.plan(adapted, **GPU)
    dtypes = {p.dtype for p in adapted.parameters() if p.requires_grad}
    same(plan, program(*named, "--adapter-precision", {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtypes.pop()]))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert not dtypes and plan.to_dict()["model"]["trained_parameters"] == trained


def test_quantization(tmp_path):
    nf4 = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    file = saved(tmp_path, json.loads(nf4.to_json_string(use_diff=False)), "quantization.json")
    named = program("--model", "llama-2-7b", "--lora", "8", "--quantization", file)
    same(plimsoll.plan("llama-2-7b", lora=8, quantization=nf4, **GPU), named)
    assert named["devices"][0]["phases"][-1]["end_allocated_bytes"] < 6e9


def test_fit(tmp_path):
    fit = plimsoll.fit(model(), **GPU)
    assert fit.fastest["verdict"] == "fits" and fit.fastest in fit.front and fit.fastest["name"] in repr(fit)
    assert fit.to_dict()["candidates"] >= fit.to_dict()["planned"]


def test_mistakes(tmp_path):
    with pytest.raises(TypeError, match=r"^plan\(\) got an unexpected keyword 'batch_size': did you mean micro_batch\?$"):
        plimsoll.plan("gpt2", batch_size=4)
    with pytest.raises(TypeError, match="unexpected keyword 'zzz': keywords are the flags of plimsoll plan --help"):
        plimsoll.plan("gpt2", zzz=4)
    with pytest.raises(TypeError, match="no keyword 'markdown'"):
        plimsoll.plan("gpt2", markdown=True)
    with pytest.raises(TypeError, match="model is a int"):
        plimsoll.plan(7)
    with pytest.raises(TypeError, match="Linear without a configuration"):
        plimsoll.plan(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="gpu= is a object"):
        plimsoll.plan("gpt2", gpu=object())
    with pytest.raises(plimsoll.PlimsollError, match='^unknown model "gpt-nope".*\n  hint: '):
        plimsoll.plan("gpt-nope", **GPU)
    wrong = {**DEEPSPEED, "zero_optimization": {"stage": 7}}
    with pytest.raises(plimsoll.PlimsollError, match=r"^deepspeed\.json:\d+:\d+: .*stage"):
        plimsoll.plan("gpt2", deepspeed=wrong, **GPU)


def test_models_that_leave_a_question():
    mixed = model()
    mixed.lm_head.float()
    with pytest.raises(plimsoll.PlimsollError, match="in bfloat16 and float32: say which one"):
        plimsoll.plan(mixed, **GPU)
    assert plimsoll.plan(mixed, precision="bf16", **GPU).fits
    frozen = model()
    frozen.model.embed_tokens.requires_grad_(False)
    with pytest.raises(plimsoll.PlimsollError, match=r"^1 of the \d+ parameters of the model are not trained"):
        plimsoll.plan(frozen, **GPU)
    assert plimsoll.plan(frozen, lora=8, **GPU).fits


def test_neither_torch_nor_transformers(tmp_path):
    lines = [
        "import sys",
        "sys.modules['torch'] = sys.modules['transformers'] = None",
        "import plimsoll",
        f"print(plimsoll.plan('gpt2', deepspeed={DEEPSPEED!r}, gpu='RTX-4090').verdict)",
    ]
    # A fresh interpreter: it is about the import.
    answer = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert answer.stdout == "fits\n"
