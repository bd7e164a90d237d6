// Package origin knows the place in the source of a training framework that makes each component of a plan: project,
// file and function, by engine, optimizer, library of modules and release. Where no source makes it, or gives its size,
// a note says what does. The places are in places.csv. "make origins" looks every place up in the releases it is for.
package origin

import (
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
)

// Job is what decides where a component comes from.
type Job struct {
	// Engine is the class that shards: one of the constants of this package.
	Engine    string
	OnCPU     bool
	Pipelined bool
	Optimizer string
	Variant   string // of the optimizer's step: foreach, fused or for-loop
	Adapter   string // the peft_type, empty without an adapter
	// Modules is the library that the model consists of. Loss says which implementation of the loss runs; it is empty
	// where that is the model's.
	Modules, Loss string
	Architecture  string // of transformers, such as LlamaForCausalLM
	ModelType     string // of transformers, such as llama
	Releases      map[Project]version.Version
}

// Project is a framework whose source is named.
type Project string

// The projects whose releases are known to a plan.
const (
	PyTorch      Project = "PyTorch"
	Transformers Project = "transformers"
	DeepSpeed    Project = "DeepSpeed"
	BitsAndBytes Project = "bitsandbytes"
)

// The engines.
const (
	Plain       = "plain" // no engine, or DistributedDataParallel
	FSDP1       = "FSDP1"
	FSDP2       = "FSDP2"
	FP16        = "FP16_Optimizer"
	FP16Unfused = "FP16_UnfusedOptimizer"
	BF16        = "BF16_Optimizer"
	ZeRO12      = "DeepSpeedZeroOptimizer"
	ZeRO3       = "DeepSpeedZeroOptimizer_Stage3"
	Megatron    = "Megatron-LM"
)

// DeepSpeed's own Adam, of states on the host and fused on the GPU, and Megatron-LM's classes around an optimizer.
const (
	CPUAdam        = "cpu adam"
	FusedAdam      = "fused adam"
	Distributed    = "distributed optimizer"
	MixedPrecision = "mixed-precision optimizer"
	Hybrid         = "hybrid optimizer" // a part of it on the CPU
)

// UnknownModules are those of a model that is given by its sizes.
const UnknownModules = "unknown"

// Of returns the origin of a component, nil where none is known.
func Of(j Job, c ledger.Component) *ledger.Origin {
	p := j.place(c)
	if p == nil {
		return nil
	}
	names := strings.NewReplacer("{type}", strings.ReplaceAll(j.ModelType, "-", "_"), "{architecture}", j.Architecture)
	o := &ledger.Origin{Project: string(p.Project), File: names.Replace(p.File), Function: names.Replace(p.Function),
		Note: p.Note}
	if release := j.Releases[p.Project]; !release.IsZero() && p.File != "" {
		o.Release = release.String()
	}
	return o
}

// place returns the place of a component: of the narrowest scope that has one for the component, else for what it is a
// part of.
func (j Job) place(c ledger.Component) *Place {
	for _, c := range []ledger.Component{c, c.PartOf()} {
		for _, scope := range j.scopes() {
			if p := j.newest(table()[entry{scope, c}]); p != nil {
				return p
			}
		}
	}
	return nil
}

// scopes returns what places of the job are filed under, the narrowest first.
func (j Job) scopes() []string {
	scopes := []string{"engine " + j.Engine, "optimizer " + j.Optimizer + "/" + j.Variant, "optimizer " + j.Optimizer,
		"loss " + j.Loss, "modules " + j.Modules, "adapter " + j.Adapter, "any"}
	if j.OnCPU {
		scopes = slices.Insert(scopes, 0, "cpu")
	}
	if j.Pipelined {
		scopes = slices.Insert(scopes, 0, "pipeline "+j.Engine)
	}
	return scopes
}

// newest returns the last of the places that the release in force has, nil for none.
func (j Job) newest(places []Place) *Place {
	for _, p := range slices.Backward(places) {
		release := j.Releases[p.Project]
		if release.IsZero() || atLeast(release, p.Since) && (p.Until.IsZero() || !atLeast(release, p.Until)) {
			return &p
		}
	}
	return nil
}

func atLeast(release, other version.Version) bool {
	return release.AtLeast(other.Major, other.Minor, other.Patch)
}
