// Package origin knows the place in the source of a training framework that makes each component of a plan: project,
// file and function, by engine and release. A test looks every place up in the installed releases.
package origin

import (
	"strings"

	"plimsoll/ledger"
	"plimsoll/version"
)

// Job is what decides where a component comes from.
type Job struct {
	// Engine is the class that shards: one of the constants of this package.
	Engine       string
	OnCPU        bool
	Optimizer    string
	Architecture string // of transformers, such as LlamaForCausalLM
	ModelType    string // of transformers, such as llama; empty for modules of another library
	Releases     map[Project]version.Version
}

// Project is a framework whose source is named.
type Project string

// The projects.
const (
	PyTorch      Project = "PyTorch"
	Transformers Project = "transformers"
	DeepSpeed    Project = "DeepSpeed"
	BitsAndBytes Project = "bitsandbytes"
	TorchAO      Project = "torchao"
	PEFT         Project = "PEFT"
	MegatronLM   Project = "Megatron-LM"
	Plimsoll     Project = "Plimsoll"
)

// The engines.
const (
	Plain    = "plain" // no engine, or DistributedDataParallel
	FSDP1    = "FSDP1"
	FSDP2    = "FSDP2"
	FP16     = "FP16_Optimizer"
	BF16     = "BF16_Optimizer"
	ZeRO12   = "DeepSpeedZeroOptimizer"
	ZeRO3    = "DeepSpeedZeroOptimizer_Stage3"
	Megatron = "Megatron-LM"
)

// DeepSpeed's own Adam: of states on the host, and fused on the GPU.
const (
	CPUAdam   = "cpu adam"
	FusedAdam = "fused adam"
)

// Place is a file of a project and a function in it.
type Place struct {
	Project  Project
	File     string
	Function string
	Since    version.Version // the first release that has the place; zero where all have it that are planned
	Until    version.Version // the first release without it; zero where the latest has it
}

// Of returns the origin of a component, nil where none is known.
func Of(j Job, c ledger.Component) *ledger.Origin {
	p := j.place(c)
	if p == nil {
		return nil
	}
	o := &ledger.Origin{Project: string(p.Project), File: p.File, Function: p.Function}
	if release := j.Releases[p.Project]; !release.IsZero() {
		o.Release = release.String()
	}
	return o
}

// place returns the place of a component: of the engine, of the optimizer, or of any job.
func (j Job) place(c ledger.Component) *Place {
	switch c {
	case ledger.MasterWeights, ledger.MasterGradients:
		if j.Engine == FP16 && j.Optimizer != FusedAdam {
			return nil // FP16_UnfusedOptimizer has them for some of these
		}
	case ledger.AdapterActivations:
		return nil // every kind of adapter has modules of its own
	case ledger.MatmulWorkspaces:
		if j.OnCPU {
			return nil // MKL and oneDNN are no part of PyTorch
		}
	case ledger.OptimizerStates, ledger.ManagedOptimizerStates, ledger.CompressionErrors:
		return j.newest(ofOptimizers[j.Optimizer])
	}
	if p := j.newest(ofEngines[j.Engine][c]); p != nil {
		return p
	}
	if j.Engine == Megatron {
		return j.newest(always[c])
	}
	if c == ledger.LogitsAndLoss && strings.HasSuffix(j.Architecture, "ForCausalLM") && j.ModelType != "" {
		if p := j.newest(loss); p != nil {
			return p
		}
	}
	if of := c.PartOf(); (of == ledger.Activations || c == ledger.LogitsAndLoss) && j.newest(always[c]) == nil {
		return j.module()
	}
	return j.newest(always[c])
}

// module returns the forward pass of the model, whose operations make activations. It is nil for modules of a library
// whose source is not known here.
func (j Job) module() *Place {
	if j.ModelType == "" || j.Architecture == "" {
		return nil
	}
	folder := strings.ReplaceAll(j.ModelType, "-", "_")
	return &Place{Project: Transformers, File: "transformers/models/" + folder + "/modeling_" + folder + ".py",
		Function: j.Architecture + ".forward"}
}

// newest returns the last of the places that the release in force has, nil for none.
func (j Job) newest(places []Place) *Place {
	for i := len(places) - 1; i >= 0; i-- {
		p := places[i]
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
