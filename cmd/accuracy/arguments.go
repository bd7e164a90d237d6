package main

import (
	"flag"
	"fmt"
	"io"
	"strings"

	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/steptime"
)

// argumentsOf returns the flags of "plimsoll plan" that rows are expressed in. They set a request and a machine.
func argumentsOf(q *job.Request, m *steptime.Machine) *flag.FlagSet {
	const giga = 1e9
	f := flag.NewFlagSet("plimsoll plan", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	for name, to := range map[string]*string{"model": &q.Model, "deepspeed": &q.DeepSpeed, "megatron": &q.Megatron,
		"training-args": &q.TrainingArgs, "accelerate": &q.Accelerate, "adapter": &q.Adapter, "gpu": &q.GPU,
		"quantization": &q.Quantization, "precision": &q.Precision, "adapter-precision": &q.AdapterPrecision,
		"attention": &q.Attention, "optimizer": &q.Optimizer, "gradient-checkpointing": &q.Recompute, "loss": &q.Loss,
		"fsdp": &q.FSDP, "model-library": &q.Modules, "pipeline-schedule": &q.PipelineSchedule, "torch": &q.Torch,
		"deepspeed-version": &q.DeepSpeedVersion, "transformers": &q.Transformers, "bitsandbytes": &q.BitsAndBytes,
		"image-size":         &q.ImageSize,
		"accelerate-version": &q.AccelerateVersion, "alloc-conf": &q.Allocator} {
		f.StringVar(to, name, *to, "")
	}
	for name, to := range map[string]*int{"gpus": &q.GPUs, "nodes": &q.Nodes, "seq-len": &q.Sequence, "lora": &q.LoRA,
		"usual-seq-len": &q.UsualSequence, "shortest-seq-len": &q.ShortestSequence,
		"micro-batch": &q.MicroBatch, "grad-accum": &q.Accumulation,
		"tensor-parallel": &q.TensorParallel, "context-parallel": &q.ContextParallel, "vocabulary": &q.Vocabulary,
		"pipeline-parallel": &q.PipelineParallel, "expert-parallel": &q.ExpertParallel} {
		f.IntVar(to, name, *to, "")
	}
	for name, to := range map[string]*bool{"compile": &q.Compile, "fsdp-offload": &q.OffloadParameters,
		"offload-activations": &q.OffloadsActivations, "cpu": &q.CPU} {
		f.BoolVar(to, name, *to, "")
	}
	f.Func("config", "", func(file string) error { q.Configs = append(q.Configs, file); return nil })
	f.Func("release", "", func(said string) error { q.Releases = append(q.Releases, said); return nil })
	f.Func("lora-targets", "", func(names string) error { q.LoRATargets = strings.Split(names, ","); return nil })
	f.Func("images", "", func(text string) error {
		q.Images = new(int)
		_, err := fmt.Sscan(text, q.Images)
		return err
	})
	f.Func("clip", "", func(text string) error {
		q.Clip = new(float64)
		_, err := fmt.Sscan(text, q.Clip)
		return err
	})
	f.Func("network", "", func(text string) error {
		_, err := fmt.Sscan(text, &m.Network)
		m.Network *= giga
		return err
	})
	return f
}
