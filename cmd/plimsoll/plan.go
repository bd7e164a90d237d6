package main

import (
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"

	"github.com/spf13/cobra"

	"plimsoll/fault"
	"plimsoll/gpu"
	"plimsoll/job"
	"plimsoll/ledger"
	"plimsoll/model"
	"plimsoll/plan"
	"plimsoll/report"
)

const checkpointingFlag = "gradient-checkpointing"

// planCommand returns the command that plans a job on paper.
func planCommand() *cobra.Command {
	var request job.Request
	var explain, out string
	var clip float64
	var format report.Format
	command := &cobra.Command{
		Use:   "plan --model MODEL",
		Short: "Say on paper what every GPU and host holds in every phase",
		Long: `Plan says what a training job will hold on its GPUs and hosts, phase by phase
and component by component, and whether it fits, before anything is started. It
reads the files that the job is started with: DeepSpeed's JSON, the Trainer's
arguments, accelerate's YAML, PEFT's adapter_config.json, bitsandbytes'
configuration. Flags say what no file says, and go before files.

It follows the job tensor by tensor: every operation of the forward and backward
pass, what it saves, the engine's buckets and gathered parameters, the optimizer
step, and the caching allocator below them.

GPUs that are known by name:
` + wrapped(gpu.Names()) + `

Optimizers that can be planned, beside the Trainer's names for them:
` + wrapped(job.Optimizers()) + `

The catalog of models:
` + wrapped(model.Catalog()),
		Example: `  plimsoll plan --model llama-3-8b --gpus 8 --gpu H100-80GB --fsdp 2 --precision bf16 --seq-len 4096
  plimsoll plan --model falcon-7b --precision fp16 --gpu A100-80GB --seq-len 128
  plimsoll plan --model path/to/config.json --deepspeed ds_config.json --gpus 8 --explain gradients`,
		Args: func(c *cobra.Command, arguments []string) error {
			// The value of this flag is optional. Without "=", the value arrives as an argument.
			if flag := c.Flags().Lookup(checkpointingFlag); len(arguments) == 1 && flag.Changed &&
				request.Recompute == flag.NoOptDefVal {
				request.Recompute = arguments[0]
				return nil
			}
			return noArguments(c, arguments)
		},
		RunE: func(c *cobra.Command, _ []string) error {
			if format == report.JSON && explain != "" {
				return &fault.Input{What: "--json and --explain are both given: each is a report of its own",
					Hint: "leave one of them out"}
			}
			request.Clip = given(c, "clip", &clip)
			return reported(func() error { return runPlan(c, request, explain, out, format) })
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.StringVar(&request.Model, "model", "", "catalog name, or a config.json or a folder with one")
	flags.StringVar(&request.DeepSpeed, "deepspeed", "", "DeepSpeed configuration `file`")
	flags.StringVar(&request.TrainingArgs, "training-args", "", "TrainingArguments of transformers, a JSON `file`")
	flags.StringVar(&request.Accelerate, "accelerate", "", "accelerate configuration, a YAML `file`")
	flags.StringVar(&request.Adapter, "adapter", "", "adapter_config.json of PEFT, a `file`")
	flags.StringVar(&request.Quantization, "quantization", "",
		"bitsandbytes: nf4, nf4-dq, fp4, fp4-dq, int8, or a `file` with a BitsAndBytesConfig")
	flags.BoolVar(&request.CPU, "cpu", false, "train on the CPU")
	flags.Var((*countFlag)(&request.GPUs), "gpus", "GPUs of a node, one rank each")
	flags.Var((*countFlag)(&request.Nodes), "nodes", "nodes of the job")
	flags.StringVar(&request.GPU, "gpu", "", "GPU `name`, such as H100-80GB")
	flags.Var((*bytesFlag)(&request.GPUMemory), "gpu-memory",
		"memory of one GPU, in place of its name's, such as 79.1GiB")
	flags.Var((*bytesFlag)(&request.HostMemory), "host-memory", "memory of one node, such as 512GiB")
	flags.Var((*countFlag)(&request.NUMANodes), "numa-nodes", "NUMA nodes of a node, among which its ranks are divided")
	flags.Var((*countFlag)(&request.Sequence), "seq-len", "tokens of a sequence")
	flags.Var((*countFlag)(&request.MicroBatch), "micro-batch", "sequences that a rank handles at a time")
	flags.Var((*countFlag)(&request.Accumulation), "grad-accum", "micro batches between two optimizer steps")
	flags.StringVar(&request.Precision, "precision", "",
		"`type` of the weights (bf16, fp16, fp32), or amp-bf16 or amp-fp16: fp32 weights under autocast")
	flags.StringVar(&request.AdapterPrecision, "adapter-precision", "",
		"`type` of the adapter's weights: fp32, bf16 or fp16")
	flags.StringVar(&request.Attention, "attention", "", "attention `implementation`: eager, sdpa or flash")
	flags.StringVar(&request.Optimizer, "optimizer", "",
		"optimizer `name`, with its variant: adamw/foreach, adamw/fused or adamw/for-loop")
	flags.Float64Var(&clip, "clip", 1, "largest norm of the gradients, 0 for no clipping")
	flags.StringVar(&request.Recompute, checkpointingFlag, "",
		"blocks that are recomputed: none, full, reentrant, or selective (results of matrix "+
			"products and attention are kept)")
	flags.Lookup(checkpointingFlag).NoOptDefVal = "full"
	flags.StringVar(&request.FSDP, "fsdp", "", "shard by FSDP of this `version`, 1 or 2, a block at a time")
	flags.BoolVar(&request.OffloadParameters, "fsdp-offload", false, "keep FSDP's shards on the host")
	flags.StringVar(&request.Modules, "modules", "", "whose `code` the model runs: transformers, litgpt or torchtitan")
	flags.BoolVar(&request.Compile, "compile", false, "the model is compiled by torch.compile")
	flags.BoolVar(&request.FusedLoss, "fused-loss", false, "linear layer and cross entropy in one kernel, as Liger's")
	flags.Var((*countFlag)(&request.TensorParallel), "tensor-parallel", "ranks that share a block's width")
	flags.Var((*countFlag)(&request.ContextParallel), "context-parallel", "ranks that share a sequence")
	flags.Var((*countFlag)(&request.ExpertParallel), "expert-parallel", "ranks that share the experts")
	flags.StringVar(&request.Torch, "torch", "", "`version` of PyTorch")
	flags.StringVar(&request.Engine, "engine-version", "", "`version` of DeepSpeed")
	flags.StringVar(&request.Transformers, "transformers", "", "`version` of transformers")
	flags.StringVar(&request.BitsAndBytes, "bitsandbytes", "", "`version` of bitsandbytes")
	flags.StringVar(&request.Allocator, "alloc-conf", "", "PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True")
	flags.StringVar(&explain, "explain", "", "explain one `component`: its bytes in every phase, formula and source")
	flags.StringVar(&out, "out", "", "write the plan to a `file`, with a hash of what it was made from, for run --plan")
	outputFlags(command, &format, "print one JSON document")
	flags.Lookup("clip").DefValue = "0" // hidden in the help
	for flag, values := range map[string][]string{
		"precision":         job.Precisions,
		"attention":         job.Attentions,
		checkpointingFlag:   job.Recomputes,
		"gpu":               gpu.Names(),
		"optimizer":         job.Optimizers(),
		"fsdp":              {"1", "2"},
		"quantization":      {"nf4", "nf4-dq", "fp4", "fp4-dq", "int8"},
		"adapter-precision": {"fp32", "bf16", "fp16"},
	} {
		mustRegister(command, flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveDefault))
	}
	mustRegister(command, "model", completeModel)
	return command
}

// bytesFlag is a size in bytes on the command line.
type bytesFlag ledger.Bytes

func (b *bytesFlag) String() string {
	if *b == 0 {
		return ""
	}
	return ledger.Bytes(*b).String()
}
func (b *bytesFlag) Type() string { return "size" }
func (b *bytesFlag) Set(text string) error {
	bytes, err := ledger.ParseBytes(text)
	if err == nil && (bytes == 0 || text[len(text)-1] <= '9') { // a number without a unit is most likely a mistake
		err = fmt.Errorf("expected a number above 0 with a unit, such as 80GiB")
	}
	*b = bytesFlag(bytes)
	return err
}

// countFlag is a count on the command line. A missing flag differs from zero.
type countFlag int

func (n *countFlag) String() string {
	if *n == 0 {
		return ""
	}
	return strconv.Itoa(int(*n))
}
func (n *countFlag) Type() string { return "int" }
func (n *countFlag) Set(text string) error {
	count, err := strconv.Atoi(text)
	if err != nil || count < 1 {
		return fmt.Errorf("expected a whole number from 1 on")
	}
	*n = countFlag(count)
	return nil
}

// reported turns a panic of body into an error. Left alone, Go would end the program with the exit code of bad input.
func reported(body func() error) (err error) {
	defer func() {
		if found := recover(); found != nil {
			err = &fault.Internal{Err: fmt.Errorf("%v\n%s", found, debug.Stack())}
		}
	}()
	return body()
}

func runPlan(c *cobra.Command, request job.Request, explain, out string, format report.Format) error {
	job, err := request.Resolve()
	if err != nil {
		return err
	}
	p, err := plan.New(job)
	if err != nil {
		return err
	}
	document, err := report.NewPlanDocument(c.Root().Version, request, p)
	if err != nil {
		return err
	}
	if out != "" {
		file, err := create("--out", out)
		if err != nil {
			return err
		}
		if err := errors.Join(report.WriteJSON(file, document), file.Close()); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
	}
	page := document.Page()
	if explain != "" {
		if page, err = document.Explain(explain); err != nil {
			return err
		}
	}
	if err := page.Write(c.OutOrStdout(), format); err != nil {
		return err
	}
	if p.Verdict.Result == plan.DoesNotFit {
		return outcome(exitDoesNotFit)
	}
	return nil
}
