package lever

import (
	"fmt"
	"maps"
	"reflect"
	"slices"

	"plimsoll/internal/base/files"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
)

// requestFlag is how a request says a setting.
type requestFlag struct {
	given func(*job.Request) bool // the request says it, so that what files say does not count
	set   func(*job.Request, any)
	says  func(any) string
}

// flags are those of plimsoll plan, by the settings that they say.
var flags = map[recipe.Setting]requestFlag{
	recipe.MicroBatch:   count("micro-batch", func(q *job.Request) *int { return &q.MicroBatch }),
	recipe.Accumulation: count("grad-accum", func(q *job.Request) *int { return &q.Accumulation }),
	recipe.Stage:        word("zero", func(q *job.Request) *string { return &q.ZeRO }),
	recipe.OptimizerName: {
		given: func(q *job.Request) bool { return q.Optimizer != "" },
		set:   func(q *job.Request, to any) { q.Optimizer = optimizerFlag(to) },
		says:  func(to any) string { return "--optimizer " + optimizerFlag(to) },
	},
	recipe.GradientCheckpointing: {
		given: func(q *job.Request) bool { return q.Recompute != "" },
		set: func(q *job.Request, to any) {
			q.Recompute = map[bool]string{true: "full", false: "none"}[to == true]
		},
		says: func(to any) string {
			return "--gradient-checkpointing" + map[bool]string{false: "=none"}[to == true]
		},
	},
	recipe.FSDPOffload: {
		given: func(q *job.Request) bool { return q.OffloadParameters || q.FSDP != "" },
		set:   func(q *job.Request, to any) { q.OffloadParameters = to == true },
		says:  func(any) string { return "--fsdp-offload" },
	},
	recipe.OptimizerDevice: zeroOffload(job.OffloadedOptimizer),
	recipe.ParameterDevice: zeroOffload(job.OffloadedParameters),
	recipe.PipelineSchedule: word("pipeline-schedule", func(q *job.Request) *string { return &q.PipelineSchedule }).
		givenWhere(func(q *job.Request) bool { return q.PipelineParallel > 0 }),
	sharded: word("fsdp", func(q *job.Request) *string { return &q.FSDP }).givenWhere(always),
	gpus:    count("gpus", func(q *job.Request) *int { return &q.GPUs }).givenWhere(always),
	nodes:   count("nodes", func(q *job.Request) *int { return &q.Nodes }).givenWhere(always),

	allocConf: word("alloc-conf", func(q *job.Request) *string { return &q.Allocator }).givenWhere(always),
	recipe.Liger: {
		given: func(q *job.Request) bool { return q.Loss != "" },
		set:   func(q *job.Request, _ any) { q.Loss = "fused" },
		says:  func(any) string { return "--loss fused" },
	},
	recipe.BF16: precision,
	recipe.FP16: precision,
	hostStates:  word("offload", func(q *job.Request) *string { return &q.Offload.What }).givenWhere(always),
	hostUpdate:  word("optimizer", func(q *job.Request) *string { return &q.Optimizer }).givenWhere(always),
	stateDisk: {
		given: always,
		set: func(q *job.Request, to any) {
			q.Offload.Tier = job.Tier{}
			if to != nil {
				q.Offload.Tier.Disks = 1
			}
		},
		says: func(to any) string { return fmt.Sprintf("--tier %v", to) },
	},
	activations: {
		given: always,
		set:   func(q *job.Request, to any) { q.OffloadsActivations = to == true },
		says:  func(any) string { return "--offload-activations" },
	},
	adapterRank: count("lora", func(q *job.Request) *int { return &q.LoRA }).givenWhere(always),
	adapted: {
		given: always,
		set:   func(q *job.Request, to any) { q.LoRATargets = []string{fmt.Sprint(to)} },
		says:  func(to any) string { return fmt.Sprintf("--lora-targets %v", to) },
	},
	quantization: word("quantization", func(q *job.Request) *string { return &q.Quantization }).givenWhere(always),

	recipe.RolloutSleep:     engineFlag,
	recipe.RolloutFraction:  engineFlag,
	recipe.RolloutLogProbs:  engineFlag,
	recipe.RolloutJudged:    engineFlag,
	recipe.RolloutReference: engineFlag,
	recipe.RolloutBackups:   engineFlag,
	recipe.RolloutServer:    engineFlag,

	sequence: count("seq-len", func(q *job.Request) *int { return &q.Sequence }).givenWhere(always),
}

// precision is the type that the passes compute in.
var precision = word("precision", func(q *job.Request) *string { return &q.Precision })

// always is for settings of the program that starts the ranks.
func always(*job.Request) bool { return true }

func (f requestFlag) givenWhere(given func(*job.Request) bool) requestFlag {
	f.given = given
	return f
}

// count is a flag with a number, 0 if it is not given.
func count(name string, of func(*job.Request) *int) requestFlag {
	return requestFlag{
		given: func(q *job.Request) bool { return *of(q) > 0 },
		set:   func(q *job.Request, to any) { *of(q) = to.(int) },
		says:  func(to any) string { return fmt.Sprintf("--%s %v", name, to) },
	}
}

// word is a flag with a word, "" if it is not given.
func word(name string, of func(*job.Request) *string) requestFlag {
	return requestFlag{
		given: func(q *job.Request) bool { return *of(q) != "" },
		set:   func(q *job.Request, to any) { *of(q) = fmt.Sprint(to) },
		says:  func(to any) string { return fmt.Sprintf("--%s %v", name, to) },
	}
}

// zeroOffload is a value of --zero-offload, which belongs to --zero.
func zeroOffload(what string) requestFlag {
	return requestFlag{
		given: func(q *job.Request) bool { return q.ZeRO != "" },
		set: func(q *job.Request, to any) {
			q.ZeROOffload = slices.DeleteFunc(slices.Clone(q.ZeROOffload), func(o string) bool { return o == what })
			if to == "cpu" {
				q.ZeROOffload = append(q.ZeROOffload, what)
			}
		},
		says: func(to any) string {
			if to == "cpu" {
				return "--zero-offload " + what
			}
			return "without --zero-offload " + what
		},
	}
}

// fusedAdamW is what --optimizer calls trainerFused.
const fusedAdamW = "adamw/" + string(job.Fused)

func optimizerFlag(name any) string {
	if name == trainerFused {
		return fusedAdamW
	}
	return fmt.Sprint(name)
}

// Applied is a job with other settings, in the user's files and in the flags of the request.
type Applied struct {
	Edits   []amend.Edit `json:"edits"`
	Flags   []string     `json:"flags"` // of plimsoll plan, for settings that no file says
	Texts   files.Texts  `json:"-"`     // of edited files
	Request job.Request  `json:"-"`     // for the edited files
}

// Apply says settings of a job in its files. A flag of the request changes where the request has it, as it goes before
// all files, and where no file can say the setting. Apply returns nil if there is no such flag either, or if all
// settings are as they were.
func Apply(q job.Request, paths []string, settings []amend.Setting) (*Applied, error) {
	a := &Applied{Flags: []string{}, Request: q}
	says := flags
	if q.Megatron != "" {
		says = flagsBeside(q.Megatron, q.Texts)
	}
	var inFiles []amend.Setting
	for _, s := range settings {
		if f, ok := says[s.Name]; ok && f.given(&a.Request) {
			a.raise(f, s)
		} else {
			inFiles = append(inFiles, s)
		}
	}
	made, err := amend.Apply(q.Texts, paths, inFiles)
	if err != nil {
		return nil, err
	}
	if q.Megatron != "" && len(made.Edits) == 0 {
		made.Rest = inFiles // arguments that are typed, or a script that cannot be edited
	}
	for _, s := range made.Rest {
		f, ok := says[s.Name]
		if !ok {
			return nil, nil
		}
		a.raise(f, s)
	}
	if len(made.Edits)+len(a.Flags) == 0 {
		return nil, nil
	}
	a.Edits, a.Texts = append([]amend.Edit{}, made.Edits...), made.Texts
	return a, nil
}

// raise sets a flag of the request, unless it has the value.
func (a *Applied) raise(f requestFlag, s amend.Setting) {
	before := a.Request
	if f.set(&a.Request, s.To); !reflect.DeepEqual(a.Request, before) {
		a.Flags = append(a.Flags, f.says(s.To))
	}
}

// amended returns the request with the edited texts in place of the files.
func (a *Applied) amended() job.Request {
	q := a.Request
	q.Texts = files.Texts{}
	maps.Copy(q.Texts, a.Request.Texts)
	maps.Copy(q.Texts, a.Texts)
	return q
}
