package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/input/model"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/lever"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/steptime"
	"plimsoll/internal/show/report"
)

// planOptions are the flags of the verb.
type planOptions struct {
	request      job.Request
	clip         float64
	explain, out string
	advise       bool
	strict, long bool
	apply        string
	table        bool
	machine      machineOptions
	format       report.Format
	program      programOptions
}

// programOptions are the flags of a program that plans itself.
type programOptions struct {
	command  []string
	patience time.Duration
	vary     string
	whatIf   []string
	snapshot string
	data     string
	memory   ledger.Bytes // of this host
}

// planCommand returns the command that plans a job on paper.
func planCommand() *cobra.Command {
	var options planOptions
	command := &cobra.Command{
		Use:   "plan [MODEL] [GPU] [CONFIG...] [-- PROGRAM...]",
		Short: "Plan what every GPU and host holds in every phase, on paper",
		Long: `Plan says what a training job will hold on its GPUs and hosts, phase by phase
and component by component, and whether that fits. It starts nothing.

Plan reads the files that the job is started with: configurations of
LLaMA-Factory, axolotl, ms-swift, torchtune, torchtitan, LitGPT and TRL,
DeepSpeed's JSON, transformers' TrainingArguments, accelerate's YAML, PEFT's
adapter_config.json and bitsandbytes' configuration. It recognizes a CONFIG by
its content. Flags say what no file says, and go before files. Of Megatron-LM it
takes a launch script, a list of arguments or YAML, which say all of the job but
its machine.

Plan follows the job tensor by tensor: every operation of the forward and
backward pass and what autograd saves for it, communication buckets, gathered
parameters, the optimizer step, and PyTorch's caching allocator.

After --, plan takes a program as it is: python train.py, torchrun, accelerate
launch or deepspeed. The program then plans itself, on GPUs that are not there:
PyTorch runs it for two optimizer steps without a GPU, and no numbers are
computed.

"plimsoll models" lists the models that --model knows by name, and
"plimsoll models --gpus" the GPUs that --gpu knows.

Optimizers that --optimizer knows, beside the Trainer's names for them:
` + wrapped(job.Optimizers()),
		Example: `  plimsoll plan qwen2.5-7b 4090
  plimsoll plan --model llama-3-8b --gpus 8 --gpu H100-80GB --fsdp 2 \
    --precision bf16 --seq-len 4096
  plimsoll plan --model falcon-7b --precision fp16 --gpu A100-80GB --seq-len 128
  plimsoll plan --model qwen3-4b --gpus 8 examples/llama_factory.yaml
  plimsoll plan --model path/to/config.json --deepspeed ds_config.json \
    --gpus 8 --explain gradients
  plimsoll plan pretrain_gpt.sh --gpus 8 --nodes 4 --gpu H100-80GB`,
		RunE: func(c *cobra.Command, _ []string) error {
			return reported(func() error { return runPlan(c, options) })
		},
	}
	planFlags(command, &options)
	read := command.Args
	command.Args = func(c *cobra.Command, arguments []string) error {
		if dash := c.ArgsLenAtDash(); dash >= 0 {
			options.program.command, arguments = arguments[dash:], arguments[:dash]
		}
		return read(c, arguments)
	}
	return command
}

const checkpointingFlag = "gradient-checkpointing"

// jobArguments has a command take files and names as arguments, and among them the value of the flag for gradient
// checkpointing. That value is optional, and arrives as an argument where the flag was given without "=".
func jobArguments(c *cobra.Command, q *job.Request, to *[]string) {
	isLacking := func() bool {
		flag := c.Flags().Lookup(checkpointingFlag)
		return flag.Changed && q.Recompute == flag.NoOptDefVal
	}
	c.Args = func(c *cobra.Command, arguments []string) error {
		if isLacking() {
			arguments = recomputeAmong(q, arguments)
		}
		if len(arguments) > 0 && slices.Contains(launchers, filepath.Base(arguments[0])) {
			return programWithoutDashes(c, arguments)
		}
		if q.AnyRank {
			logTo(c)("the adapter has a rank of %d, as in most recipes: set yours with --lora or --qlora",
				job.UsualRank)
		}
		if err := rankNamesGPU(q); err != nil {
			return err
		}
		arguments, unknown, err := namedArguments(q, arguments)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(unknown, func(a string) bool { return slices.Contains(job.Recomputes, a) }) {
			return noArguments(c, unknown)
		}
		if to == &q.Configs {
			unknown = nameMissing(q, unknown)
		}
		*to = append(*to, slices.Concat(arguments, unknown)...)
		return nil
	}
	c.ValidArgsFunction = func(_ *cobra.Command, arguments []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(arguments) == 0 && isLacking() {
			return job.Recomputes, cobra.ShellCompDirectiveDefault
		}
		return nil, cobra.ShellCompDirectiveDefault
	}
}

// leastNumberOfGPU is the least number that is the name of a GPU and could be the rank of an adapter.
const leastNumberOfGPU = 1000

// rankNamesGPU refuses the name of a GPU as the rank of an adapter, which somebody has left out.
func rankNamesGPU(q *job.Request) error {
	for flag, rank := range map[string]int{"lora": q.LoRA, "qlora": q.QLoRA} {
		if rank >= leastNumberOfGPU && q.GPU == "" && isNamedGPU(strconv.Itoa(rank)) {
			return fault.Inputf("--%s %d: %d is the name of a GPU, expected the rank of an adapter", flag, rank, rank).
				WithHint(fmt.Sprintf("--gpu %d --%s 16", rank, flag))
		}
	}
	return nil
}

// recomputeAmong takes what is recomputed from among arguments, and returns the others: a value that there is, or else
// a word that comes near to one, or that can name nothing else.
func recomputeAmong(q *job.Request, arguments []string) []string {
	i := slices.IndexFunc(arguments, func(a string) bool {
		return slices.Contains(job.Recomputes, a) || strings.HasPrefix(a, "every-")
	})
	if i < 0 {
		i = slices.IndexFunc(arguments, func(a string) bool {
			near := fault.Nearest(a, job.Recomputes) != "" || q.Model != "" && !strings.ContainsAny(a, "./0123456789")
			return near && !isThere(a) && !model.IsNamed(a) && !isNamedGPU(a)
		})
	}
	if i < 0 {
		return arguments
	}
	q.Recompute = arguments[i]
	return slices.Delete(slices.Clone(arguments), i, i+1)
}

// launchers are words that begin the command of a program.
var launchers = []string{"python", "python3", "torchrun", "accelerate", "deepspeed"}

// programWithoutDashes refuses a program that is not behind --.
func programWithoutDashes(c *cobra.Command, arguments []string) error {
	return fault.Inputf("%s is a program, expected a file", arguments[0]).
		WithHint(fmt.Sprintf("give it behind --: %s -- %s", c.CommandPath(), strings.Join(arguments, " ")))
}

// namedArguments takes the names of a model and of a GPU from among arguments, and returns the others: files, and words
// that nothing here knows and that do not look like files.
func namedArguments(q *job.Request, arguments []string) (files, unknown []string, err error) {
	if err := countedGPU(q); err != nil {
		return nil, nil, err
	}
	for _, a := range arguments {
		switch {
		case isThere(a):
			files = append(files, a)
		case model.IsNamed(a) && q.Model == "":
			q.Model = a
		case model.IsNamed(a):
			return nil, nil, fault.Inputf("%s and --model %s both name a model", a, q.Model).
				WithHint("leave one of them out")
		case q.GPU == "" && isNamedGPU(a):
			q.GPU = a
			if err := countedGPU(q); err != nil {
				return nil, nil, err
			}
		case isName.MatchString(a) && !endsAsFile.MatchString(a):
			unknown = append(unknown, a)
		default:
			files = append(files, a)
		}
	}
	return files, unknown, nil
}

// nameMissing takes unknown words for the names of the model and of the GPU where those are missing, so that their
// readers say which names come near. It returns the words that are left.
func nameMissing(q *job.Request, unknown []string) (left []string) {
	for _, a := range unknown {
		switch {
		case q.Model == "":
			q.Model = a
		case q.GPU == "":
			q.GPU = a
		default:
			left = append(left, a)
		}
	}
	return left
}

var (
	// isName matches what can be the name of a model or of a GPU.
	isName = lazyregexp.New(`^(?:[\w-]+/)?[\w][\w.-]*$`)
	// endsAsFile matches names that end as those of files do: in letters behind a point.
	endsAsFile = lazyregexp.New(`\.[a-zA-Z]+$`)
)

func isNamedGPU(name string) bool {
	if !strings.ContainsFunc(name, unicode.IsDigit) || strings.ContainsAny(name, "./") {
		return false
	}
	_, name, _ = gpu.Counted(name)
	return gpu.Means(name)
}

// countedGPU takes the number of GPUs from before their name.
func countedGPU(q *job.Request) error {
	n, name, is := gpu.Counted(q.GPU)
	switch {
	case !is:
		return nil
	case n == 0:
		return fault.Inputf("--gpu %s: expected 1 GPU or more", q.GPU)
	case q.GPUs > 0 && q.GPUs != n:
		return fault.Inputf("--gpu %s and --gpus %d differ", q.GPU, q.GPUs).WithHint("leave --gpus out")
	}
	q.GPU, q.GPUs = name, n
	return nil
}

func isThere(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

func planFlags(c *cobra.Command, o *planOptions) {
	c.Flags().SortFlags = false
	jobFlags(c, &o.request, &o.clip)
	jobArguments(c, &o.request, &o.request.Configs)
	group(c, statesOnHost, func() { offloadFlags(c, &o.request.Offload) })
	group(c, megatron.Program, func() { megatronFlags(c, &o.request.MegatronArguments) })
	group(c, machineSpeed, func() {
		machineFlags(c, &o.machine)
		networkFlag(c, &o.machine)
	})
	group(c, "A program that plans itself", func() { programFlags(c, &o.program) })
	group(c, "Result", func() { resultFlags(c, o) })
}

// programFlags adds the flags for a program behind --.
func programFlags(c *cobra.Command, p *programOptions) {
	flags := c.Flags()
	flags.StringVar(&p.vary, "vary", "", "run the program with several `values` of {NAME} in its arguments: "+
		"batch=1,2,4, or batch=1..64 to find the largest that fits")
	flags.StringArrayVar(&p.whatIf, "what-if", nil, "also say what PyTorch would reserve with these `settings` of "+
		"PYTORCH_CUDA_ALLOC_CONF, without running again; may be given again")
	flags.StringVar(&p.snapshot, "snapshot", "", "keep the history of the GPU's memory in a `file`, for plimsoll "+
		"explain and PyTorch's viewer")
	flags.StringVar(&p.data, "data", "", "synthetic makes up data sets and tokenizers that are not here, in rows of "+
		"--seq-len tokens; `synthetic:COLUMNS` names the columns, such as messages")
	flags.Var((*bytesFlag)(&p.memory), "program-memory", "memory of this host that the program may take "+
		"(default: 90 % of what is left)")
	flags.DurationVar(&p.patience, "patience", planPatience, "how long a program may take to plan itself")
}

// resultFlags adds the flags for what plan answers.
func resultFlags(c *cobra.Command, o *planOptions) {
	flags := c.Flags()
	flags.StringVar(&o.explain, "explain", "",
		"explain one `component`: its bytes in every phase, the formula and its source; or explain the interval")
	complete(c, "explain", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return componentsOf(o.request), cobra.ShellCompDirectiveNoFileComp
	})
	flags.StringVar(&o.out, "out", "",
		"write the plan to a `file` for run --plan, with a hash of every file that it was made from")
	flags.BoolVar(&o.advise, "advise", false, "also say what would make a job faster that fits")
	flags.StringVar(&o.apply, "apply", "", "write copies of the files with the first advice to a `folder`")
	flags.BoolVar(&o.strict, "strict", false, "end with code 3 unless the upper end of the interval fits, too")
	flags.BoolVar(&o.long, "long", false, "show all that the plan knows, and not one screen of it")
	flags.BoolVar(&o.table, "table", false, "show a table of all figures of each phase in place of bars")
	htmlFlag(c)
	outputFlags(c, &o.format, "print one JSON document")
}

// jobFlags adds the flags that say what a job is.
func jobFlags(c *cobra.Command, q *job.Request, clip *float64) {
	group(c, "Model and files", func() { fileFlags(c, q) })
	group(c, "Machine", func() { hardwareFlags(c, q) })
	group(c, "Batches", func() { batchFlags(c, q) })
	group(c, "Training", func() { trainingFlags(c, q, clip) })
	group(c, "Sharding and parallelism", func() { parallelFlags(c, q) })
	group(c, "Releases and what was measured", func() { releaseFlags(c, q) })
}

// fileFlags adds the flags for the model and for files.
func fileFlags(c *cobra.Command, q *job.Request) {
	flags := c.Flags()
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
		"stored weights: VALUES, or a `file` with a BitsAndBytesConfig or quantization_config", job.Quantizations())
}

// hardwareFlags adds the flags for GPUs, hosts and their memory.
func hardwareFlags(c *cobra.Command, q *job.Request) {
	flags := c.Flags()
	choiceFlag(c, &q.GPU, "gpu", "", "GPU `name`, such as H100-80GB, or several on a node: 8xH100", gpu.Names())
	flags.Var((*gpusFlag)(&q.GPUs), "gpus", "GPUs of each node, one rank each")
	flags.Var((*countFlag)(&q.Nodes), "nodes", "nodes of the job")
	flags.Var((*bytesFlag)(&q.GPUMemory), "gpu-memory", "memory of one GPU, such as 79.1GiB (default: that of --gpu)")
	flags.Var((*bytesFlag)(&q.HostMemory), "host-memory", "memory of one node, such as 512GiB")
	flags.Var((*countFlag)(&q.NUMANodes), "numa-nodes", "NUMA nodes of each node; its ranks divide them")
	flags.BoolVar(&q.CPU, "cpu", false, "train on the CPU")
}

// batchFlags adds the flags for what a step reads.
func batchFlags(c *cobra.Command, q *job.Request) {
	flags := c.Flags()
	flags.Var((*countFlag)(&q.Sequence), "seq-len", "tokens of a sequence")
	flags.Var((*countFlag)(&q.UsualSequence), "usual-seq-len",
		"tokens of a sequence after the first micro batch, which has the longest (default: those of --seq-len)")
	flags.Var((*countFlag)(&q.ShortestSequence), "shortest-seq-len",
		"tokens of the shortest sequence, if lengths vary from it to --seq-len: the allocator then reserves more")
	flags.Var((*countFlag)(&q.MicroBatch), "micro-batch", "sequences of a rank's micro batch")
	flags.Var((*countFlag)(&q.Accumulation), "grad-accum",
		"gradient accumulation steps: micro batches of an optimizer step")
	flags.Var(optionalCount{&q.Images}, "images", "`images` in every sequence, for models that read images; 0 is text "+
		"only")
	flags.StringVar(&q.ImageSize, "image-size", "", "`height and width` of images in pixels, such as 768x1024")
}

// trainingFlags adds the flags for how a model is trained.
func trainingFlags(c *cobra.Command, q *job.Request, clip *float64) {
	flags := c.Flags()
	choiceFlag(c, &q.Precision, "precision", "",
		"`dtype` of the parameters: VALUES (amp: fp32 parameters under autocast)", job.Precisions)
	choiceFlag(c, &q.Optimizer, "optimizer", "", "optimizer `name`, also with its implementation: adamw/foreach, "+
		"adamw/fused or adamw/for-loop; plimsoll is plimsoll.torch.AdamW, also with its format: plimsoll/int8",
		append(job.Optimizers(), job.ServiceOptimizer))
	flags.Float64Var(clip, "clip", 1, "clip gradients to this global `norm`; 0 turns clipping off")
	flags.Lookup("clip").DefValue = "0" // hidden in the help
	choiceFlag(c, &q.Recompute, checkpointingFlag, "", "`blocks` whose activations are recomputed in the backward "+
		"pass: VALUES; selective keeps the results of matrix products and attention, every-n recomputes one of n "+
		"blocks", job.Recomputes)
	flags.Lookup(checkpointingFlag).NoOptDefVal = "full"
	choiceFlag(c, &q.Attention, "attention", "", "attention `implementation`: VALUES", job.Attentions)
	flags.BoolVar(&q.Compile, "compile", false, "torch.compile compiles the model")
	choiceFlag(c, &q.Loss, "loss", "", "`loss`, VALUES: fp32 is that of transformers, native leaves the logits in the "+
		"model's dtype, chunked is litgpt's, and fused Liger's", job.Losses)
	flags.BoolVar(&q.FusedLoss, "fused-loss", false,
		"fuse the linear layer before the loss with the cross entropy, as Liger does")
	flags.StringSliceVar(&q.Freeze, "freeze", nil, "`parts` of a multimodal model that are not trained: "+
		strings.Join(model.PartNames(), ", "))
	flags.Var(rankFlag{&q.LoRA, &q.Shorthand}, "lora",
		"`rank` of a LoRA adapter, with PEFT's defaults for what --adapter would say (without a rank: 16)")
	flags.StringSliceVar(&q.LoRATargets, "lora-targets", nil, "`modules` that --lora adapts, such as q_proj,v_proj, "+
		"or all-linear (default: PEFT's for the model)")
	flags.Var(rankFlag{&q.QLoRA, &q.Shorthand}, "qlora",
		"`rank` of a LoRA adapter of all linear modules of a model in NF4 (without a rank: 16)")
	flags.BoolVar(&q.OffloadsActivations, "offload-activations", false, "what the backward pass needs waits on the "+
		"host, as with TRL's activation_offloading")
	choiceFlag(c, &q.AdapterPrecision, "adapter-precision", "", "`dtype` of the adapter's parameters: VALUES",
		job.AdapterPrecisions)
	flags.StringVar(&q.Reference, "reference-model", "", "frozen `model` beside the trained one, as DPO and RLHF have")
	flags.Var((*joinedFlag)(&q.Rollout), "rollout", "`engine` that generates answers on the same GPUs, with its share "+
		"of a GPU and settings, such as vllm:0.5,sleep=1; may be given again")
	choiceFlag(c, &q.Modules, "model-library", "", "`library` whose code the model runs: VALUES", job.ModelLibraries)
}

// parallelFlags adds the flags for how ranks share a model.
func parallelFlags(c *cobra.Command, q *job.Request) {
	flags := c.Flags()
	choiceFlag(c, &q.ZeRO, "zero", "", "`stage` of DeepSpeed's ZeRO, VALUES, with DeepSpeed's defaults for what "+
		"--deepspeed would say", job.ZeROStages)
	flags.StringSliceVar(&q.ZeROOffload, "zero-offload", nil, "`what` --zero keeps on the host: "+
		strings.Join(job.ZeROOffloads, ", "))
	complete(c, "zero-offload", cobra.FixedCompletions(job.ZeROOffloads, cobra.ShellCompDirectiveNoFileComp))
	choiceFlag(c, &q.FSDP, "fsdp", "", "`version` of FSDP to shard with, VALUES; every block is a unit",
		job.FSDPVersions)
	flags.BoolVar(&q.OffloadParameters, "fsdp-offload", false, "FSDP keeps its shards on the host")
	flags.Var((*countFlag)(&q.TensorParallel), "tensor-parallel", "tensor parallel `degree`")
	flags.Var((*countFlag)(&q.PipelineParallel), "pipeline-parallel", "pipeline parallel `degree`: stages of "+
		"torch.distributed.pipelining or of DeepSpeed, which --grad-accum micro batches go through in a step")
	choiceFlag(c, &q.PipelineSchedule, "pipeline-schedule", "", "`schedule` of the pipeline, VALUES",
		job.PipelineSchedules)
	flags.StringVar(&q.PipelinePartition, "pipeline-partition", "", "how DeepSpeed's PipelineModule cuts layers into "+
		"stages: its partition_`method`")
	flags.Var((*countFlag)(&q.ContextParallel), "context-parallel", "context parallel `degree`")
	flags.Var((*countFlag)(&q.ExpertParallel), "expert-parallel", "expert parallel `degree`")
}

// releaseFlags adds the flags for what depends on releases and runs.
func releaseFlags(c *cobra.Command, q *job.Request) {
	flags := c.Flags()
	flags.StringVar(&q.Environment, "environment", "", "`file` or folder that says all releases: requirements, "+
		"pip freeze, uv.lock, poetry.lock, or an environment of Python")
	flags.StringArrayVar(&q.Releases, "release", nil, "`package=version` of a program, such as trl=1.6.0 (may be "+
		"repeated)")
	flags.StringVar(&q.Torch, "torch", "", "`version` of PyTorch")
	flags.StringVar(&q.Transformers, "transformers", "", "`version` of transformers")
	flags.StringVar(&q.AccelerateVersion, "accelerate-version", "", "`version` of accelerate")
	flags.StringVar(&q.DeepSpeedVersion, "deepspeed-version", "", "`version` of DeepSpeed")
	flags.StringVar(&q.BitsAndBytes, "bitsandbytes", "", "`version` of bitsandbytes")
	flags.StringVar(&q.Allocator, "alloc-conf", "",
		"`options` of PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True")
	flags.StringVar(&q.Factors, "factors", "", "`file` of compare --learn: what a recorded run has taught")
}

// offloadFlags adds the flags of plimsoll.torch.StateOffload.
func offloadFlags(c *cobra.Command, o *job.Offload) {
	choiceFlag(c, &o.What, "offload", "", "`what` rests on the host: VALUES; the optimizer's states, which the GPU "+
		"updates", []string{job.OffloadStates})
	choiceFlag(c, &o.Mode, "offload-mode", "", "`how` states come to the GPU: VALUES (default: chunked)",
		job.OffloadModes)
	restFlags(c, o)
	tierOnPaperFlags(c, &o.Tier, "--optimizer plimsoll: its states")
	c.Flags().Var((*countFlag)(&o.Tenants), "tenants", "--optimizer plimsoll: `adapters` with states in memory, which "+
		"one model trains in turns")
}

// restFlags adds the flags that say how states rest on the host.
func restFlags(c *cobra.Command, o *job.Offload) {
	flags := c.Flags()
	flags.Var((*bytesFlag)(&o.Chunk), "offload-chunk", "states that come at a time (default: 64MiB)")
	flags.Float64Var(&o.Fraction, "offload-fraction", 0, "`share` of the states that rests on the host (default: 1)")
	choiceFlag(c, &o.Master, "master", "", "master `weights` beside 16-bit parameters: VALUES; split: the low halves "+
		"of fp32 weights, whose high halves are the parameters (default: none)", job.Masters)
	choiceFlag(c, &o.Moments, "offload-moments", "", "`dtype` on the host of states that are fp32: VALUES "+
		"(default: fp32)", job.OffloadMoments)
	flags.BoolVar(&o.NoRecovery, "no-recovery", false, "hold neither gradients nor parameters on the host, with which "+
		"an unfinished step is finished")
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
	if o.program.vary != "" {
		return runVaried(c, o)
	}
	document, err := o.document(c)
	if err != nil {
		return err
	}
	if o.out != "" {
		if err := writeDocument("--out", o.out, document); err != nil {
			return err
		}
	}
	page := document.Page()
	page.Screen.Table = o.table
	if o.explain != "" {
		if page, err = document.Explain(o.explain); err != nil {
			return err
		}
	}
	if err := present(c, page, o.format); err != nil {
		return err
	}
	if document.Lacks(o.strict) {
		return outcome(exitDoesNotFit)
	}
	return nil
}

// runVaried plans a program with several values of an argument.
func runVaried(c *cobra.Command, o planOptions) error {
	for _, flag := range []string{"out", "explain", "apply", "advise", "what-if", "snapshot"} {
		if c.Flags().Changed(flag) {
			return fault.Inputf("--vary and --%s are both given, but --vary makes several plans", flag).
				WithHint("give --" + flag + " with one value in the program's arguments")
		}
	}
	if len(o.program.command) == 0 {
		return fault.Inputf("--vary is given without a program").
			WithHint("give the program behind --, as in plimsoll plan --vary batch=1..64 -- python train.py " +
				"--batch {batch}")
	}
	document, err := planVaried(c, o)
	if err != nil {
		return err
	}
	if err := present(c, document.Page(), o.format); err != nil {
		return err
	}
	if !document.Fits() {
		return outcome(exitDoesNotFit)
	}
	return nil
}

// document plans the job.
func (o *planOptions) document(c *cobra.Command) (*report.PlanDocument, error) {
	if len(o.program.command) > 0 {
		return planProgram(c, *o)
	}
	for _, flag := range []string{"patience", "vary", "what-if", "snapshot", "data", "program-memory"} {
		if c.Flags().Changed(flag) {
			return nil, fault.Inputf("--%s is given without a program", flag).
				WithHint("give the program behind --, as in plimsoll plan -- python train.py")
		}
	}
	if err := checkMegatron(c, &o.request); err != nil {
		return nil, err
	}
	o.request.Clip = given(c, "clip", &o.clip)
	of, err := o.machine.read(c, &o.request)
	if err != nil {
		return nil, err
	}
	resolved, err := o.request.Resolve()
	if err != nil {
		return nil, err
	}
	p, err := plan.New(resolved)
	if err != nil {
		return nil, err
	}
	document, err := report.NewPlanDocument(c.Root().Version, o.request, p)
	if err != nil {
		return nil, err
	}
	machine, sources, err := of.timed(resolved)
	if err != nil {
		return nil, err
	}
	if document.StepTime, err = report.NewStepTime(p, machine, sources); err != nil {
		return nil, err
	}
	if err := o.advised(p, machine, document); err != nil {
		return nil, err
	}
	if here, err := host.Local(); err == nil && document.HasHostStep() {
		if found, file := (hostProfile{o.machine.hostProfile, 0, logTo(c)}).of(here); found != nil {
			document.PredictHostStep(found, file)
		}
	}
	return document, nil
}

// advised adds advice to the document, and writes the edited files of the first.
func (o *planOptions) advised(p *plan.Plan, m steptime.Machine, document *report.PlanDocument) error {
	if p.Verdict.Result == plan.Fits && !o.advise && o.apply == "" {
		return nil
	}
	question := lever.Question{Need: lever.NeedOf(p), Request: o.request, Plan: p, Machine: m}
	list, err := lever.For(question)
	if err != nil {
		return err
	}
	if question.Need == lever.GPUMemory || question.Need == lever.HostMemory {
		if document.Ladder, err = lever.Climb(question); err != nil {
			return err
		}
	}
	document.Advice = list
	if o.apply == "" {
		return nil
	}
	if l := document.Ladder; l != nil && l.All != nil && len(l.All.Texts) > 0 && l.All.Verdict != plan.DoesNotFit {
		list = []lever.Change{*l.All}
	}
	at := slices.IndexFunc(list, func(c lever.Change) bool { return len(c.Texts) > 0 })
	if at < 0 {
		return fault.Inputf("--apply is given, but there is no advice that edits a file").
			WithHint("leave --apply out")
	}
	a := &list[at]
	texts, err := byName("--apply", a.Texts)
	if err != nil {
		return err
	}
	written, err := writeNew("--apply", o.apply, texts)
	document.Applied = &report.PlanApplied{Files: written, Replaces: slices.Sorted(maps.Keys(a.Texts)),
		Flags: append([]string{}, a.Flags...), Verdict: a.Verdict}
	return err
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
