#!/usr/bin/env python3
"""Lists the causal language models of Hugging Face transformers, as in causal.golden.

    causal.py > causal.golden

A line holds a model_type and the class that AutoModelForCausalLM makes of it.
"""

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as classes

print("# transformers", transformers.__version__)
for model_type in sorted(classes):
    print(model_type, classes[model_type])
