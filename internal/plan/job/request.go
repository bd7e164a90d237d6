package job

import (
	"reflect"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
)

// Request is what a user asks for. A zero value is not given: a file sets it, or
// a default applies, which the plan lists as an assumption.
type Request struct {
	Model        string // an argument of model.Load
	Reference    string `json:",omitempty"` // the same, of a frozen reference model
	Online       bool   // ask the Hugging Face hub for a model that this host does not have
	DeepSpeed    string // this and the next four are files
	TrainingArgs string
	Accelerate   string
	Adapter      string
	Quantization string // a file, or nf4, fp4, int8, nf4-dq, fp4-dq

	Shorthand // in place of the files above

	MegatronArguments

	// Configs are further files, each of them recognized by its content.
	Configs []string `json:",omitempty"`

	CPU         bool // there are no GPUs
	GPUs, Nodes int  // GPUs of a node, nodes of the job
	GPU         string
	GPUMemory   ledger.Bytes
	HostMemory  ledger.Bytes
	NUMANodes   int // of a node

	Sequence, MicroBatch, Accumulation int
	Lengths

	Images    *int     `json:",omitempty"` // of a sequence
	ImageSize string   `json:",omitempty"` // height and width in pixels, such as 768x1024
	Freeze    []string `json:",omitempty"` // of model.Parts

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
	Loss              string `json:",omitempty"` // one of Losses

	TensorParallel, ContextParallel, ExpertParallel int
	PipelineParallel                                int    `json:",omitempty"`
	PipelineSchedule                                string `json:",omitempty"` // one of PipelineSchedules
	PipelinePartition                               string `json:",omitempty"` // of DeepSpeed: a partition_method

	// Modules is the library whose modules the model consists of: transformers,
	// litgpt or torchtitan.
	Modules string

	Torch                      string // this and the next four are versions
	DeepSpeedVersion           string `json:"Engine"` // its key in plimsoll.plan/2
	Transformers, BitsAndBytes string
	AccelerateVersion          string `json:",omitempty"`
	Allocator                  string // PYTORCH_CUDA_ALLOC_CONF

	Recorded

	Offload Offload `json:",omitzero"`

	// Texts stand for files of the request, and for those that they name.
	Texts files.Texts `json:"-"`
}

// Lengths are those of sequences that are not the longest.
type Lengths struct {
	// UsualSequence is the length in all micro batches but the first, which has the longest sample; 0 for Sequence.
	UsualSequence int `json:",omitempty"`
	// ShortestSequence is the length that lengths vary from; 0 if all sequences are as long.
	ShortestSequence int `json:",omitempty"`
}

// Recorded are files of what a job runs on, and of what it has run like.
type Recorded struct {
	Environment string   `json:",omitempty"` // requirements, a lock file or a folder of Python's packages
	Releases    []string `json:",omitempty"` // of packages, such as trl=1.6.0
	Factors     string   `json:",omitempty"` // a file of compare --learn
}

// The allowed values of some fields. Help and completion use them, too.
var (
	Precisions = []string{"bf16", "fp16", "fp32", "amp-bf16", "amp-fp16"}
	Attentions = []string{"sdpa", "flash", "flash3", "flash4", "eager"}
	Recomputes = []string{"none", "full", "reentrant", "selective", "every-2"}

	Losses = []string{"fp32", "native", "chunked", "fused"}

	AdapterPrecisions = []string{"fp32", "bf16", "fp16"}
	FSDPVersions      = []string{"1", "2"}
	ModelLibraries    = []string{transformersModules, litgptModules, "torchtitan"}
)

// Resolve reads the files and decides what the request leaves open. Every error
// is a *fault.Input.
func (q Request) Resolve() (*Job, error) {
	in, err := Read(q)
	if err != nil {
		return nil, err
	}
	return Decide(in, Overrides{})
}

// IsEmpty reports whether nothing is given.
func (q Request) IsEmpty() bool { return reflect.ValueOf(q).IsZero() }
