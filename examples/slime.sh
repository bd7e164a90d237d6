#!/bin/bash
# GRPO with slime: SGLang generates on the GPUs that Megatron core trains on.
MODEL=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128
    --group-query-attention --num-query-groups 4 --qk-layernorm --swiglu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --vocab-size 151936
    --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)
PARALLEL=(
    --tensor-model-parallel-size 4 --sequence-parallel
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 20480
)
OPTIMIZER=(
    --optimizer adam --attention-dropout 0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32
    --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
)
ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
    "${MODEL[@]}" "${PARALLEL[@]}" "${OPTIMIZER[@]}" \
    --hf-checkpoint Qwen3-30B-A3B --ref-load Qwen3-30B-A3B_torch_dist \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --num-rollout 1000 \
    --rollout-max-context-len 16384 --advantage-estimator grpo --use-kl-loss \
    --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7
