package main

import (
	"fmt"
	"strings"
)

// commandLine returns the request as a user would type it.
func (e *expression) commandLine() string {
	q := e.request
	var b strings.Builder
	b.WriteString("plimsoll plan")
	add := func(flag string, value any) {
		switch v := value.(type) {
		case string:
			if v == "" {
				return
			}
		case int:
			if v == 0 || v == 1 && flag != "fsdp" {
				return
			}
		case bool:
			if v {
				fmt.Fprintf(&b, " --%s", flag)
			}
			return
		}
		fmt.Fprintf(&b, " --%s=%v", flag, value)
	}
	add("model", q.Model)
	add("deepspeed", q.DeepSpeed)
	add("training-args", q.TrainingArgs)
	add("adapter", q.Adapter)
	add("quantization", q.Quantization)
	add("gpus", q.GPUs)
	add("nodes", q.Nodes)
	add("gpu", q.GPU)
	add("seq-len", q.Sequence)
	add("usual-seq-len", q.UsualSequence)
	add("micro-batch", q.MicroBatch)
	add("grad-accum", q.Accumulation)
	add("precision", q.Precision)
	add("adapter-precision", q.AdapterPrecision)
	add("attention", q.Attention)
	add("optimizer", q.Optimizer)
	add("gradient-checkpointing", q.Recompute)
	add("fsdp", q.FSDP)
	add("fsdp-offload", q.OffloadParameters)
	add("model-library", q.Modules)
	add("compile", q.Compile)
	add("tensor-parallel", q.TensorParallel)
	add("context-parallel", q.ContextParallel)
	add("pipeline-parallel", q.PipelineParallel)
	add("pipeline-schedule", q.PipelineSchedule)
	add("torch", q.Torch)
	add("deepspeed-version", q.DeepSpeedVersion)
	add("transformers", q.Transformers)
	add("accelerate-version", q.AccelerateVersion)
	add("bitsandbytes", q.BitsAndBytes)
	add("alloc-conf", q.Allocator)
	return b.String()
}
