# What scripts take from TRL beside its trainers and their configurations: fields of dataclasses with their defaults, and
# functions of these (trl/scripts/utils.py, trl/trainer/model_config.py and trl/trainer/utils.py of July 2026, f2cd5771).
from dataclasses import dataclass

from peft import LoraConfig
from transformers import BitsAndBytesConfig


@dataclass
class ScriptArguments:
    dataset_name = None
    dataset_config = None
    dataset_train_split = "train"
    dataset_test_split = "test"
    dataset_streaming = False
    ignore_bias_buffers = False


@dataclass
class ModelConfig:
    model_name_or_path = None
    model_revision = "main"
    dtype = "float32"
    trust_remote_code = False
    attn_implementation = None
    use_peft = False
    lora_r = 16
    lora_alpha = 32
    lora_dropout = 0.05
    lora_target_modules = None
    lora_target_parameters = None
    lora_modules_to_save = None
    lora_task_type = "CAUSAL_LM"
    use_rslora = False
    use_dora = False
    load_in_8bit = False
    load_in_4bit = False
    bnb_4bit_quant_type = "nf4"
    use_bnb_nested_quant = False
    bnb_4bit_quant_storage = None


def get_peft_config(model_args):
    if model_args.use_peft is False:
        return None
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        bias="none",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
    )


def get_quantization_config(model_args):
    if model_args.load_in_4bit:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=model_args.dtype,
            bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
            bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
        )
    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return None


def get_kbit_device_map():
    return None
