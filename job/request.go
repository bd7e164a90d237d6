package job

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/fault"
	"plimsoll/forward"
	"plimsoll/gpu"
	"plimsoll/ledger"
	"plimsoll/model"
	"plimsoll/recipe"
	"plimsoll/version"
)

// Request is what a user asks for. A zero value is not given: a file sets it, or
// a default applies, which the plan lists as an assumption.
type Request struct {
	Model        string // an argument of model.Load
	DeepSpeed    string // this and the next four are files
	TrainingArgs string
	Accelerate   string
	Adapter      string
	Quantization string // a file, or nf4, fp4, int8, nf4-dq, fp4-dq

	CPU         bool // there are no GPUs
	GPUs, Nodes int  // GPUs of a node, nodes of the job
	GPU         string
	GPUMemory   ledger.Bytes
	HostMemory  ledger.Bytes
	NUMANodes   int // of a node

	Sequence, MicroBatch, Accumulation int

	Precision         string
	AdapterPrecision  string
	Attention         string
	Optimizer         string // name, or name/variant
	Clip              *float64
	Recompute         string // "", "none", "full", "reentrant" or "selective"
	FSDP              string // "", "1" or "2"
	OffloadParameters bool   // FSDP keeps its shards on the host
	Compile           bool
	FusedLoss         bool

	TensorParallel, ContextParallel, ExpertParallel int

	// Modules is the library whose modules the model consists of: transformers,
	// litgpt or torchtitan.
	Modules string

	Torch                      string // this and the next three are versions
	DeepSpeedVersion           string `json:"Engine"` // its key in plimsoll.plan/2
	Transformers, BitsAndBytes string
	Allocator                  string // PYTORCH_CUDA_ALLOC_CONF
}

// The allowed values of some fields, for help and completion, too.
var (
	Precisions = []string{"bf16", "fp16", "fp32", "amp-bf16", "amp-fp16"}
	Attentions = []string{"sdpa", "flash", "eager"}
	Recomputes = []string{"none", "full", "reentrant", "selective", "every-2"}

	AdapterPrecisions = []string{"fp32", "bf16", "fp16"}
	FSDPVersions      = []string{"1", "2"}
	ModelLibraries    = []string{transformersModules, "litgpt", "torchtitan"}
)

// resolver turns a request into a job.
type resolver struct {
	Request
	job      *Job
	training *recipe.Training
	launch   *recipe.Accelerate
	assumed  []string
}

func (r *resolver) assume(format string, arguments ...any) {
	r.assumed = append(r.assumed, fmt.Sprintf(format, arguments...))
}

// Resolve reads the files and decides what the request leaves open. Every error
// is a *fault.Input.
func (q Request) Resolve() (*Job, error) {
	r := &resolver{Request: q, job: &Job{Allocator: q.Allocator}}
	for _, step := range []func() error{r.read, r.versions, r.ranks, r.size, r.types, r.readAdapter, r.chooseOptimizer,
		r.passes, r.sharding, r.contradictions, r.unplanned} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	r.job.Assumptions = r.assumed
	return r.job, nil
}

// read reads the files of the model, the training and the engine.
func (r *resolver) read() (err error) {
	if r.Request.Model == "" {
		return &fault.Input{What: "no model was named",
			Hint: "add --model with a name of the catalog or the path of a config.json"}
	}
	if r.job.Model, err = model.Load(r.Request.Model); err != nil {
		return cmp.Or(recipe.Misplaced(r.Request.Model), err)
	}
	if m := r.job.Model; m.Network == nil {
		in := &fault.Input{Where: fault.Position{File: m.Source},
			What: "the headers of weights do not say how the model computes, so its activations cannot be planned",
			Hint: "name the model's config.json"}
		if m.Architecture != "" { // from the config.json beside the weights
			in.What, in.Hint = fmt.Sprintf("how %s computes is not known here, so its activations cannot be planned",
				m.Architecture), "planned are "+strings.Join(model.Architectures(), ", ")
		}
		return in
	}
	if r.TrainingArgs != "" {
		if r.training, err = recipe.LoadTraining(r.TrainingArgs); err != nil {
			return err
		}
		r.job.DeepSpeed, r.job.FSDP = r.training.DeepSpeed, r.training.FSDP
		r.note(r.training.Notes)
	}
	if r.Accelerate != "" {
		if r.launch, err = recipe.LoadAccelerate(r.Accelerate); err != nil {
			return err
		}
		if r.launch.DeepSpeed != nil {
			r.job.DeepSpeed = r.launch.DeepSpeed
		}
		if r.launch.FSDP != nil {
			r.job.FSDP = r.launch.FSDP
		}
		r.note(r.launch.Notes)
	}
	if r.DeepSpeed != "" {
		if r.job.DeepSpeed, err = recipe.LoadDeepSpeed(r.DeepSpeed); err != nil {
			return err
		}
	}
	if d := r.job.DeepSpeed; d != nil {
		if len(d.Unplanned) > 0 {
			return &fault.Input{Where: d.Unplanned[0].Where, What: d.Unplanned[0].What + ", which is not planned yet",
				Hint: "remove it, and expect the job to take another amount of memory than the plan says"}
		}
		r.note(d.Notes)
	}
	if r.job.DeepSpeed != nil && (r.job.FSDP != nil || r.Request.FSDP != "") {
		return &fault.Input{What: "DeepSpeed and FSDP are both configured: a model is sharded by one of them",
			Hint: "leave one of them out"}
	}
	return nil
}

func (r *resolver) note(notes []recipe.Note) {
	for _, n := range notes {
		r.assume("%v", n)
	}
}

// versions parses the versions. It assumes the newest known release of torch and
// of DeepSpeed, and releases of the other programs from torch's time.
func (r *resolver) versions() error {
	v := &r.job.Versions
	torch, err := version.Parse(cmp.Or(r.Torch, "2.13.0"))
	if err != nil {
		return &fault.Input{What: "--torch", Err: err}
	}
	beside := contemporaries(torch)
	for _, program := range []struct {
		flag, text, name, newest string
		to                       *version.Version
		used                     bool
	}{
		{"--torch", r.Torch, "torch", "2.13.0", &v.Torch, true},
		{"--transformers", r.Transformers, "transformers", beside.transformers, &v.Transformers, true},
		{"--bitsandbytes", r.BitsAndBytes, "bitsandbytes", beside.bitsandbytes, &v.BitsAndBytes,
			r.Request.Quantization != "" || r.job.Model.Quantized},
		{"--deepspeed-version", r.DeepSpeedVersion, "DeepSpeed", "0.19.6", &v.DeepSpeed, r.job.DeepSpeed != nil},
	} {
		text := program.text
		if text == "" {
			text = program.newest
			if program.used {
				r.assume("%s %s: no version was given", program.name, program.newest)
			}
		}
		parsed, err := version.Parse(text)
		if err != nil {
			return &fault.Input{What: program.flag, Err: err}
		}
		*program.to = parsed
	}
	if (r.Modules == "" || r.Modules == transformersModules) && v.Transformers.AtLeast(5, 0, 0) {
		r.job.Model.ToVersion5()
	}
	return nil
}

// ranks sets the number of ranks and the devices that they run on.
func (r *resolver) ranks() error {
	j := r.job
	j.Nodes, j.RanksPerNode = max(r.Nodes, 1), r.GPUs
	if l := r.launch; l != nil {
		if r.Nodes == 0 && l.Machines > 0 {
			j.Nodes = l.Machines
		}
		switch {
		case r.GPUs > 0:
		case l.Processes > 0:
			j.RanksPerNode = max(1, l.Processes/j.Nodes)
		case len(l.GPUs) > 0 && l.Engine != "none":
			j.RanksPerNode = len(l.GPUs)
		}
	}
	if r.GPUs < 0 || r.Nodes < 0 {
		return &fault.Input{What: fmt.Sprintf("--gpus %d and --nodes %d: counts cannot be negative", r.GPUs, r.Nodes)}
	}
	if r.GPUMemory < 0 || r.HostMemory < 0 {
		return &fault.Input{What: fmt.Sprintf("--gpu-memory %v and --host-memory %v: sizes cannot be negative",
			r.GPUMemory, r.HostMemory)}
	}
	j.OnCPU = r.CPU || r.training != nil && r.training.OnCPU || r.launch != nil && r.launch.OnCPU
	if j.OnCPU && (r.GPUs > 0 && r.CPU || r.GPU != "" || r.GPUMemory > 0 || j.DeepSpeed != nil || j.FSDP != nil ||
		r.Request.FSDP != "") {
		return &fault.Input{What: "training on the CPU is planned without GPUs, DeepSpeed and FSDP",
			Hint: "leave --cpu out"}
	}
	if j.RanksPerNode == 0 {
		j.RanksPerNode = 1
		if !j.OnCPU {
			r.assume("one GPU: --gpus was not given")
		}
	}
	if j.Nodes > maxRanks || j.RanksPerNode > maxRanks || j.Nodes*j.RanksPerNode > maxRanks {
		return &fault.Input{What: fmt.Sprintf("%d nodes of %d GPUs are more than %d ranks",
			j.Nodes, j.RanksPerNode, maxRanks)}
	}
	j.World = j.Nodes * j.RanksPerNode
	if r.GPU != "" {
		g, err := gpu.Find(r.GPU)
		if err != nil && r.GPUMemory == 0 {
			return err
		}
		j.GPU = g
		if err != nil {
			j.GPU = gpu.Model{Name: r.GPU}
		}
	} else {
		j.GPU = gpu.Model{Name: "GPU"}
		if r.GPUMemory == 0 && !j.OnCPU {
			r.assume("nothing is known of the GPU's memory: there is no verdict on it without --gpu or --gpu-memory")
		}
	}
	if r.GPUMemory > 0 {
		j.GPU.Memory = r.GPUMemory
	}
	if r.NUMANodes < 0 || r.NUMANodes > 1024 {
		return &fault.Input{What: fmt.Sprintf("--numa-nodes is %d, expected a number from 1 to 1024", r.NUMANodes)}
	}
	j.HostMemory, j.NUMANodes = r.HostMemory, r.NUMANodes
	return nil
}

const maxRanks = 1 << 20

// size sets the micro batch, the sequence length and the accumulation.
func (r *resolver) size() error {
	j := r.job
	for _, n := range []struct {
		flag  string
		value int
	}{{"--seq-len", r.Sequence}, {"--micro-batch", r.MicroBatch}, {"--grad-accum", r.Accumulation}} {
		if n.value < 0 || n.value > 1<<26 {
			return &fault.Input{What: fmt.Sprintf("%s is %d, expected a number from 1 to %d", n.flag, n.value, 1<<26)}
		}
	}
	j.Sequence, j.MicroBatch, j.Accumulation = int64(r.Sequence), int64(r.MicroBatch), r.Accumulation
	if t := r.training; t != nil {
		if j.MicroBatch == 0 {
			j.MicroBatch = int64(t.MicroBatch)
		}
		if j.Accumulation == 0 {
			j.Accumulation = t.GradientAccumulation
		}
	}
	if d := j.DeepSpeed; d != nil && (d.Batch.Micro > 0 || d.Batch.Train > 0) {
		if j.MicroBatch == 0 || j.Accumulation == 0 {
			b, err := d.ResolveBatch(j.World)
			if err != nil {
				return err
			}
			if j.MicroBatch == 0 {
				j.MicroBatch = int64(b.Micro)
			}
			if j.Accumulation == 0 {
				j.Accumulation = b.Accumulation
			}
		}
	}
	if j.Sequence == 0 {
		j.Sequence = 2048
		if longest := positions(j.Model.Network, j.Model.Parameters); longest > 0 {
			j.Sequence = min(j.Sequence, longest)
		}
		r.assume("sequences of %d tokens: --seq-len was not given", j.Sequence)
	}
	if j.MicroBatch == 0 {
		j.MicroBatch = 1
		r.assume("a micro batch of 1 sequence: --micro-batch was not given")
	}
	j.Accumulation = max(1, j.Accumulation)
	return nil
}

// types sets the type of the weights and of autocast.
func (r *resolver) types() error {
	j := r.job
	mixed := recipe.Unmixed
	if r.launch != nil && r.launch.Precision != "" {
		mixed = r.launch.Precision
	}
	if t := r.training; t != nil && t.Precision != recipe.Unmixed && t.Precision != "" {
		mixed = t.Precision
	}
	named, known := precisions[strings.ToLower(r.Precision)]
	switch {
	case r.Precision != "" && !known:
		hint := "expected one of " + strings.Join(Precisions, ", ")
		if near := fault.Nearest(r.Precision, Precisions); near != "" {
			hint = fmt.Sprintf("did you mean %q? %s", near, hint)
		}
		return &fault.Input{What: fmt.Sprintf("unknown precision %q", r.Precision), Hint: hint}
	case known:
		j.ParameterType = named.weights
		if named.autocast != recipe.Unmixed {
			mixed = named.autocast
		}
		if d := j.DeepSpeed; d != nil && d.Precision != dtype.Invalid && d.Precision != j.ParameterType {
			return &fault.Input{Where: fault.Position{File: d.File},
				What: fmt.Sprintf("DeepSpeed trains in %v, and --precision is %s", d.Precision, r.Precision),
				Hint: "leave --precision out, or change the file"}
		}
	case j.DeepSpeed != nil && j.DeepSpeed.Precision != dtype.Invalid:
		j.ParameterType = j.DeepSpeed.Precision
	case j.DeepSpeed != nil && mixed != recipe.Unmixed:
		j.ParameterType = mixedType(mixed)
	case mixed != recipe.Unmixed:
		j.ParameterType = dtype.F32
		r.assume("weights in fp32 under autocast to %s: --precision was not given", mixed)
	default:
		j.ParameterType = j.Model.Parameters[0].DType
		r.assume("weights in %v, as the model was published: --precision was not given", j.ParameterType)
	}
	if mixed != recipe.Unmixed && j.DeepSpeed == nil {
		j.AutocastType = mixedType(mixed)
	}
	return nil
}

// precisions maps the names of precisions, Lightning's spellings included, to
// the type of the weights and to autocast.
var precisions = func() map[string]struct {
	weights  dtype.Type
	autocast recipe.Precision
} {
	type precision = struct {
		weights  dtype.Type
		autocast recipe.Precision
	}
	m := map[string]precision{}
	for names, p := range map[string]precision{
		"fp32 float32 32 32-true":                 {dtype.F32, recipe.Unmixed},
		"bf16 bfloat16 bf16-true":                 {dtype.BF16, recipe.Unmixed},
		"fp16 float16 16-true":                    {dtype.F16, recipe.Unmixed},
		"amp-bf16 bf16-amp bf16-mixed mixed-bf16": {dtype.F32, recipe.MixedBF16},
		"amp-fp16 fp16-amp 16-mixed mixed-fp16":   {dtype.F32, recipe.MixedF16},
	} {
		for name := range strings.FieldsSeq(names) {
			m[name] = p
		}
	}
	return m
}()

func mixedType(p recipe.Precision) dtype.Type {
	switch p {
	case recipe.MixedF16:
		return dtype.F16
	case recipe.Unmixed:
		return dtype.Invalid
	}
	return dtype.BF16
}

// release is a release of torch with the newest releases of its time.
type release struct {
	torch                      version.Version
	transformers, bitsandbytes string
}

// releases are in the order of time, by the dates on PyPI.
var releases = []release{
	{version.Version{Major: 1, Minor: 0}, "4.16.0", "0.26.0"},
	{version.Version{Major: 1, Minor: 12}, "4.20.0", "0.31.0"},
	{version.Version{Major: 1, Minor: 13}, "4.24.0", "0.35.0"},
	{version.Version{Major: 2, Minor: 0}, "4.27.0", "0.37.0"},
	{version.Version{Major: 2, Minor: 1}, "4.36.0", "0.41.0"},
	{version.Version{Major: 2, Minor: 2}, "4.38.0", "0.42.0"},
	{version.Version{Major: 2, Minor: 3}, "4.40.0", "0.43.0"},
	{version.Version{Major: 2, Minor: 4}, "4.43.0", "0.43.0"},
	{version.Version{Major: 2, Minor: 5}, "4.46.0", "0.44.0"},
	{version.Version{Major: 2, Minor: 6}, "4.48.0", "0.45.0"},
	{version.Version{Major: 2, Minor: 7}, "4.51.0", "0.45.0"},
	{version.Version{Major: 2, Minor: 8}, "4.55.0", "0.46.0"},
	{version.Version{Major: 2, Minor: 9}, "4.57.0", "0.48.0"},
	{version.Version{Major: 2, Minor: 10}, "5.0.0", "0.49.0"},
	{version.Version{Major: 2, Minor: 13}, "5.23.0", "0.49.0"},
}

// contemporaries returns the newest releases at the time of a release of torch.
func contemporaries(torch version.Version) release {
	last := releases[0]
	for _, r := range releases {
		if torch.AtLeast(r.torch.Major, r.torch.Minor, 0) {
			last = r
		}
	}
	return last
}

const transformersModules = "transformers"

// modules sets the library of the model's modules and the settings that follow
// from it.
func (r *resolver) modules() error {
	j := r.job
	j.Modules = r.Modules
	switch r.Modules {
	case "", transformersModules:
	case "litgpt": // litgpt/model.py, litgpt/utils.py
		j.FusedActivations, j.FusedQKV = true, true
		if j.Loss != forward.CompiledLoss {
			j.Loss = forward.ChunkedLoss
		}
	case "torchtitan": // the training loop deletes the outputs before the backward pass
		j.HoldsOutputs, j.KeepsLastBlock = false, true
		if j.Loss == forward.CompiledLoss && !j.Versions.Torch.AtLeast(2, 8, 0) {
			j.Loss = forward.ShiftLabels // only the blocks were compiled
		}
	default:
		return &fault.Input{What: fmt.Sprintf("unknown model library %q", r.Modules),
			Hint: "expected " + fault.OneOf(ModelLibraries...)}
	}
	return nil
}

// passes sets how the forward and backward passes run.
func (r *resolver) passes() error {
	j := r.job
	attention := r.Attention
	if attention == "" {
		attention = string(forward.SDPA)
		if !j.Versions.Transformers.AtLeast(4, 36, 0) || !j.Versions.Torch.AtLeast(2, 1, 1) {
			attention = string(forward.Eager) // SDPA has been the default since these releases
		}
		r.assume("%s attention: --attention was not given", attention)
	}
	if attention == "flash_attention_2" || attention == "flash-attention-2" || attention == "flash2" {
		attention = string(forward.Flash)
	}
	if !slices.Contains(Attentions, attention) {
		return &fault.Input{What: fmt.Sprintf("unknown attention %q", r.Attention),
			Hint: "expected one of " + strings.Join(Attentions, ", ")}
	}
	j.Attention = forward.AttentionKind(attention)
	if j.Attention == forward.Flash && j.ParameterType == dtype.F32 && j.AutocastType == dtype.Invalid {
		return &fault.Input{What: "flash attention computes in bf16 and fp16 only, and the precision is fp32",
			Hint: "use --attention sdpa, or --precision bf16"}
	}

	recompute := r.Recompute
	if recompute == "" && r.training != nil && r.training.Checkpointing.Enabled {
		recompute = "full"
		if r.training.Checkpointing.Reentrant {
			recompute = "reentrant"
		}
		if r.training.Checkpointing.Offload {
			return &fault.Input{Where: fault.Position{File: r.training.File},
				What: "gradient checkpointing with \"offload\" keeps the inputs of blocks on the host, which is not " +
					"planned yet",
				Hint: "remove the key, and expect the job to take less of the GPU and more of the host than the " +
					"plan says"}
		}
		j.RecomputeEvery, j.RecomputeFirst = r.training.Checkpointing.EveryN, true
	}
	if recompute == "" && j.FSDP != nil && j.FSDP.ActivationCheckpointing {
		recompute = "full"
	}
	switch recompute {
	case "", "none":
	case "full":
		j.Recompute = &autograd.Checkpoint{}
	case "reentrant":
		j.Recompute = &autograd.Checkpoint{Reentrant: true}
	case "selective":
		j.Recompute = &autograd.Checkpoint{Selective: 2}
	case "every-2":
		j.Recompute, j.RecomputeEvery = &autograd.Checkpoint{}, 2
	default:
		return &fault.Input{What: fmt.Sprintf("unknown way to recompute activations: %q", recompute),
			Hint: "expected one of " + strings.Join(Recomputes, ", ")}
	}
	j.HoldsOutputs = r.training == nil
	if !j.Versions.Transformers.AtLeast(4, 46, 0) {
		j.Loss = forward.ShiftLogits
	}
	j.Compile = r.Compile || r.training != nil && r.training.TorchCompile || compiles(r.launch)
	if j.Compile {
		// Inductor fuses pointwise operations between matmuls. In the backward
		// pass it recomputes them where that is cheaper than keeping them.
		j.Loss = forward.CompiledLoss
		if j.Recompute == nil {
			j.Recompute = &autograd.Checkpoint{Selective: 1}
		}
	}
	if err := r.modules(); err != nil {
		return err
	}
	if r.FusedLoss || r.training != nil && r.training.UseLigerKernel {
		j.Loss = forward.FusedLoss
	}
	j.Parallel = Parallel{Tensor: int64(max(1, r.TensorParallel)), Context: int64(max(1, r.ContextParallel)),
		Expert: int64(max(1, r.ExpertParallel))}
	if d := j.DeepSpeed; d != nil && r.TensorParallel == 0 {
		j.Parallel.Tensor = int64(max(1, d.TensorParallel))
	}
	if l := r.launch; l != nil && l.Parallelism != nil {
		if ranks := l.Parallelism.Ranks(); ranks != j.World {
			return &fault.Input{Where: fault.Position{File: l.File},
				What: fmt.Sprintf("parallelism_config makes %d ranks, and the job has %d", ranks, j.World),
				Hint: "change --gpus, --nodes or one of the sizes"}
		}
		j.Parallel.Tensor, j.Parallel.Context = int64(l.Parallelism.Tensor), int64(l.Parallelism.Context)
	}
	if j.World%int(j.Parallel.Tensor*j.Parallel.Context) != 0 {
		return &fault.Input{What: fmt.Sprintf("%d ranks cannot be divided among tensor parallelism of %d and context "+
			"parallelism of %d", j.World, j.Parallel.Tensor, j.Parallel.Context),
			Hint: "give a number of GPUs that is a multiple"}
	}
	if j.Sequence%j.Parallel.Context != 0 {
		return &fault.Input{What: fmt.Sprintf("sequences of %d tokens cannot be divided among %d ranks",
			j.Sequence, j.Parallel.Context)}
	}
	return nil
}
