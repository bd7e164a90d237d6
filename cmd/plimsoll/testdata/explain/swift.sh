#!/bin/bash
swift sft \
    --model Qwen/Qwen3-4B \
    --train_type full \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 4 \
    --max_length 4096 \
    --gradient_checkpointing false \
    --output_dir out
