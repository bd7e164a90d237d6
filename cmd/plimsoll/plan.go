package main

import (
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"plimsoll/fault"
	"plimsoll/gpu"
	"plimsoll/host"
	"plimsoll/job"
	"plimsoll/model"
	"plimsoll/plan"
	"plimsoll/report"
)

// planOptions are the flags of the verb.
type planOptions struct {
	request      job.Request
	clip         float64
	explain, out string
	hostProfile  string
	format       report.Format
}

// planCommand returns the command that plans a job on paper.
func planCommand() *cobra.Command {
	var options planOptions
	command := &cobra.Command{
		Use:   "plan [--model MODEL] [CONFIG...]",
		Short: "Plan what every GPU and host holds in every phase, on paper",
		Long: `Plan says what a training job will hold on its GPUs and hosts, phase by phase
and component by component, and whether that fits. It starts nothing.

Plan reads the files that the job is started with: configurations of
LLaMA-Factory, axolotl, ms-swift, torchtune, torchtitan and TRL, DeepSpeed's
JSON, transformers' TrainingArguments, accelerate's YAML, PEFT's
adapter_config.json and bitsandbytes' configuration. It recognizes a CONFIG by
its content. Flags say what no file says, and go before files.

Plan follows the job tensor by tensor: every operation of the forward and
backward pass and what autograd saves for it, communication buckets, gathered
parameters, the optimizer step, and PyTorch's caching allocator.

GPUs that --gpu knows:
` + wrapped(gpu.Names()) + `

Optimizers that --optimizer knows, beside the Trainer's names for them:
` + wrapped(job.Optimizers()) + `

The catalog of models:
` + wrapped(model.Catalog()),
		Example: `  plimsoll plan --model llama-3-8b --gpus 8 --gpu H100-80GB --fsdp 2 \
    --precision bf16 --seq-len 4096
  plimsoll plan --model falcon-7b --precision fp16 --gpu A100-80GB --seq-len 128
  plimsoll plan --model qwen3-4b --gpus 8 examples/llama_factory.yaml
  plimsoll plan --model path/to/config.json --deepspeed ds_config.json \
    --gpus 8 --explain gradients`,
		Args: func(c *cobra.Command, arguments []string) error {
			if len(arguments) > 0 && options.lacksRecompute(c) && !strings.ContainsAny(arguments[0], "./") {
				options.request.Recompute, arguments = arguments[0], arguments[1:]
			}
			if len(arguments) > 0 && slices.Contains(model.Catalog(), arguments[0]) {
				return fault.Inputf("%s is a model of the catalog, not a file", arguments[0]).
					WithHint("give it as --model " + arguments[0])
			}
			if slices.ContainsFunc(arguments, func(a string) bool { return slices.Contains(job.Recomputes, a) }) {
				return noArguments(c, arguments)
			}
			options.request.Configs = append(options.request.Configs, arguments...)
			return nil
		},
		ValidArgsFunction: func(c *cobra.Command, arguments []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(arguments) == 0 && options.lacksRecompute(c) {
				return job.Recomputes, cobra.ShellCompDirectiveDefault
			}
			return nil, cobra.ShellCompDirectiveDefault
		},
		RunE: func(c *cobra.Command, _ []string) error {
			return reported(func() error { return runPlan(c, options) })
		},
	}
	planFlags(command, &options)
	return command
}

const checkpointingFlag = "gradient-checkpointing"

// lacksRecompute reports whether the flag was given without "=". Its value is optional, and arrives as an argument.
func (o *planOptions) lacksRecompute(c *cobra.Command) bool {
	flag := c.Flags().Lookup(checkpointingFlag)
	return flag.Changed && o.request.Recompute == flag.NoOptDefVal
}

func planFlags(c *cobra.Command, o *planOptions) {
	q, flags := &o.request, c.Flags()
	flags.SortFlags = false
	choiceOrFileFlag(c, &q.Model, "model", "", "`name` in the catalog or on the Hugging Face hub, a "+
		"config.json or a folder with one",
		model.Catalog())
	flags.StringArrayVar(&q.Configs, "config", nil,
		"configuration of the job, a `file` that is recognized by its content; may be given again")
	onlineFlag(c, &q.Online)
	flags.StringVar(&q.DeepSpeed, "deepspeed", "", "DeepSpeed's configuration, a JSON `file`")
	flags.StringVar(&q.TrainingArgs, "training-args", "", "transformers' TrainingArguments, a JSON or YAML `file`")
	flags.StringVar(&q.Accelerate, "accelerate", "", "accelerate's configuration, a YAML `file`")
	flags.StringVar(&q.Adapter, "adapter", "", "PEFT's adapter_config.json, a `file`")
	choiceOrFileFlag(c, &q.Quantization, "quantization", "",
		"bitsandbytes: VALUES, or a `file` with a BitsAndBytesConfig", job.Quantizations())
	flags.BoolVar(&q.CPU, "cpu", false, "train on the CPU")
	flags.Var((*countFlag)(&q.GPUs), "gpus", "GPUs of each node, one rank each")
	flags.Var((*countFlag)(&q.Nodes), "nodes", "nodes of the job")
	choiceFlag(c, &q.GPU, "gpu", "", "GPU `name`, such as H100-80GB", gpu.Names())
	flags.Var((*bytesFlag)(&q.GPUMemory), "gpu-memory", "memory of one GPU, such as 79.1GiB (default: that of --gpu)")
	flags.Var((*bytesFlag)(&q.HostMemory), "host-memory", "memory of one node, such as 512GiB")
	flags.Var((*countFlag)(&q.NUMANodes), "numa-nodes", "NUMA nodes of each node; its ranks divide them")
	flags.Var((*countFlag)(&q.Sequence), "seq-len", "tokens of a sequence")
	flags.Var((*countFlag)(&q.MicroBatch), "micro-batch", "sequences of a rank's micro batch")
	flags.Var((*countFlag)(&q.Accumulation), "grad-accum",
		"gradient accumulation steps: micro batches of an optimizer step")
	choiceFlag(c, &q.Precision, "precision", "",
		"`dtype` of the parameters: VALUES (amp: fp32 parameters under autocast)", job.Precisions)
	choiceFlag(c, &q.AdapterPrecision, "adapter-precision", "", "`dtype` of the adapter's parameters: VALUES",
		job.AdapterPrecisions)
	choiceFlag(c, &q.Attention, "attention", "", "attention `implementation`: VALUES", job.Attentions)
	choiceFlag(c, &q.Optimizer, "optimizer", "", "optimizer `name`, also with its implementation: adamw/foreach, "+
		"adamw/fused or adamw/for-loop", job.Optimizers())
	flags.Float64Var(&o.clip, "clip", 1, "clip gradients to this global `norm`; 0 turns clipping off")
	choiceFlag(c, &q.Recompute, checkpointingFlag, "", "`blocks` whose activations are recomputed in the backward "+
		"pass: VALUES; selective keeps the results of matrix products and attention", job.Recomputes)
	flags.Lookup(checkpointingFlag).NoOptDefVal = "full"
	choiceFlag(c, &q.FSDP, "fsdp", "", "`version` of FSDP to shard with, VALUES; every block is a unit",
		job.FSDPVersions)
	flags.BoolVar(&q.OffloadParameters, "fsdp-offload", false, "FSDP keeps its shards on the host")
	choiceFlag(c, &q.Modules, "model-library", "", "`library` whose code the model runs: VALUES", job.ModelLibraries)
	flags.BoolVar(&q.Compile, "compile", false, "torch.compile compiles the model")
	flags.StringVar(&q.Reference, "reference-model", "", "frozen `model` beside the trained one, as DPO and RLHF have")
	choiceFlag(c, &q.Loss, "loss", "", "`loss`, VALUES: fp32 is that of transformers, native leaves the logits in the "+
		"model's dtype, chunked is litgpt's, and fused Liger's", job.Losses)
	flags.BoolVar(&q.FusedLoss, "fused-loss", false,
		"fuse the linear layer before the loss with the cross entropy, as Liger does")
	flags.Var((*countFlag)(&q.TensorParallel), "tensor-parallel", "tensor parallel `degree`")
	flags.Var((*countFlag)(&q.ContextParallel), "context-parallel", "context parallel `degree`")
	flags.Var((*countFlag)(&q.ExpertParallel), "expert-parallel", "expert parallel `degree`")
	flags.StringVar(&q.Torch, "torch", "", "`version` of PyTorch")
	flags.StringVar(&q.DeepSpeedVersion, "deepspeed-version", "", "`version` of DeepSpeed")
	flags.StringVar(&q.Transformers, "transformers", "", "`version` of transformers")
	flags.StringVar(&q.BitsAndBytes, "bitsandbytes", "", "`version` of bitsandbytes")
	flags.StringVar(&q.Allocator, "alloc-conf", "",
		"`options` of PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True")
	flags.StringVar(&q.Factors, "factors", "", "`file` of compare --learn: what a recorded run has taught")
	flags.StringVar(&o.explain, "explain", "",
		"explain one `component`: its bytes in every phase, the formula and its source")
	complete(c, "explain", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return componentsOf(o.request), cobra.ShellCompDirectiveNoFileComp
	})
	flags.StringVar(&o.out, "out", "",
		"write the plan to a `file` for run --plan, with a hash of every file that it was made from")
	hostProfileFlag(c, &o.hostProfile)
	outputFlags(c, &o.format, "print one JSON document")
	flags.Lookup("clip").DefValue = "0" // hidden in the help
}

// componentsOf returns the names of the components of a job, or none for a job that cannot be planned.
func componentsOf(request job.Request) []string {
	names := map[string]bool{}
	_ = reported(func() error {
		resolved, err := request.Resolve()
		if err != nil {
			return err
		}
		p, err := plan.New(resolved)
		if err != nil {
			return err
		}
		for _, device := range p.Devices {
			for _, phase := range device.Phases {
				for _, component := range phase.Components {
					names[string(component.Component)] = true
				}
			}
		}
		return nil
	})
	return slices.Sorted(maps.Keys(names))
}

func runPlan(c *cobra.Command, o planOptions) error {
	if o.format == report.JSON && o.explain != "" {
		return fault.Inputf("--json and --explain are both given: each is a report of its own").
			WithHint("leave one of them out")
	}
	o.request.Clip = given(c, "clip", &o.clip)
	resolved, err := o.request.Resolve()
	if err != nil {
		return err
	}
	p, err := plan.New(resolved)
	if err != nil {
		return err
	}
	document, err := report.NewPlanDocument(c.Root().Version, o.request, p)
	if err != nil {
		return err
	}
	if here, err := host.Local(); err == nil && document.HasHostStep() {
		if found, file := (hostProfile{o.hostProfile, 0, logTo(c)}).of(here); found != nil {
			document.PredictHostStep(found, file)
		}
	}
	if o.out != "" {
		if err := writeDocument("--out", o.out, document); err != nil {
			return err
		}
	}
	page := document.Page()
	if o.explain != "" {
		if page, err = document.Explain(o.explain); err != nil {
			return err
		}
	}
	if err := page.Write(c.OutOrStdout(), o.format); err != nil {
		return err
	}
	if p.Verdict.Result == plan.DoesNotFit {
		return outcome(exitDoesNotFit)
	}
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
