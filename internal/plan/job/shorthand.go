package job

import (
	"cmp"
	"encoding/json"
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/peft"
)

// Shorthand is what flags say in place of a file of DeepSpeed, of PEFT, or of a program that generates answers.
// Everything else has their defaults.
type Shorthand struct {
	ZeRO        string   `json:",omitempty"` // one of ZeROStages
	ZeROOffload []string `json:",omitempty"` // of ZeROOffloads
	LoRA        int      `json:",omitempty"` // rank
	LoRATargets []string `json:",omitempty"` // target_modules, or "all-linear" alone
	QLoRA       int      `json:",omitempty"` // rank of a LoRA on all linear modules of a model in NF4
	AnyRank     bool     `json:",omitempty"` // nobody gave the rank: it is UsualRank
	// OffloadsActivations keeps what the backward pass needs on the host, as TRL's OffloadActivations does.
	OffloadsActivations bool `json:",omitempty"`
	// Rollout is an engine that generates answers, as rollout.Parse reads it.
	Rollout string `json:",omitempty"`
}

// UsualRank is that of adapters in most recipes.
const UsualRank = 16

// inFull returns a request that says by other flags what --qlora says.
func (q Request) inFull() (Request, error) {
	if q.QLoRA == 0 {
		return q, nil
	}
	if q.LoRA > 0 {
		return q, fault.Inputf("--qlora and --lora both say the rank of an adapter").WithHint("leave one of them out")
	}
	q.LoRA, q.QLoRA = q.QLoRA, 0
	if len(q.LoRATargets) == 0 {
		q.LoRATargets = []string{allLinear}
	}
	q.Quantization = cmp.Or(q.Quantization, "nf4")
	return q, nil
}

// ZeROStages and ZeROOffloads are the allowed values of ZeRO and ZeROOffload.
var (
	ZeROStages   = []string{"0", "1", "2", "3"}
	ZeROOffloads = []string{OffloadedOptimizer, OffloadedParameters}
)

// OffloadedOptimizer and OffloadedParameters are what ZeRO may keep on the host.
const (
	OffloadedOptimizer  = "optimizer"
	OffloadedParameters = "parameters"
)

// partitionsParameters is the only stage of ZeRO that keeps parameters on the host.
const partitionsParameters = "3"

// shortDeepSpeed returns DeepSpeed's configuration as --zero says it.
func (in *Inputs) shortDeepSpeed() (*deepspeed.Config, error) {
	what := "--zero " + in.request.ZeRO
	if in.deepSpeed != nil {
		return nil, fault.Inputf("%s and %s both configure DeepSpeed", what, in.deepSpeed.File).
			WithHint("leave out --zero, or change the stage in the file")
	}
	text, err := in.request.ZeROConfig()
	if err != nil {
		return nil, err
	}
	return deepspeed.Parse(what, text, in.deepSpeedRelease)
}

// ZeROConfig returns the file that --zero, --zero-offload and --precision stand for: JSON of DeepSpeed.
func (q Request) ZeROConfig() ([]byte, error) {
	if !slices.Contains(ZeROStages, q.ZeRO) {
		return nil, fault.Inputf("unknown stage of ZeRO %q", q.ZeRO).WithHint("expected " + fault.OneOf(ZeROStages...))
	}
	toHost := map[string]any{"device": "cpu", "pin_memory": true}
	zero := map[string]any{"stage": json.Number(q.ZeRO)}
	for _, o := range q.ZeROOffload {
		switch o {
		case OffloadedOptimizer:
			zero["offload_optimizer"] = toHost
		case OffloadedParameters:
			zero["offload_param"] = toHost
		default:
			return nil, fault.Inputf("unknown --zero-offload %q", o).
				WithHint("expected " + fault.OneOf(ZeROOffloads...))
		}
	}
	config := map[string]any{"zero_optimization": zero}
	switch precisions[strings.ToLower(q.Precision)].weights {
	case dtype.BF16:
		config["bf16"] = map[string]any{"enabled": true}
	case dtype.F16:
		config["fp16"] = map[string]any{"enabled": true}
	case dtype.Invalid: // a trainer says it, or else the model
		config["bf16"] = map[string]any{"enabled": "auto"}
	}
	text, err := json.MarshalIndent(config, "", "  ")
	return append(text, '\n'), err
}

// shortAdapter returns PEFT's configuration as --lora says it.
func (in *Inputs) shortAdapter() (*peft.Adapter, error) {
	q := in.request
	if in.adapter != nil {
		return nil, fault.Inputf("--lora and %s both configure an adapter", in.adapter.File).
			WithHint("leave out --lora, or change the rank in the file")
	}
	config := map[string]any{"peft_type": "LORA", "r": q.LoRA}
	switch {
	case slices.Equal(q.LoRATargets, []string{allLinear}):
		config["target_modules"] = allLinear
	case len(q.LoRATargets) > 0:
		config["target_modules"] = q.LoRATargets
	}
	text, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	a, err := peft.Parse("--lora", text)
	if err != nil {
		return nil, err
	}
	a.TargetsHint = "add --lora-targets all-linear, or a list such as --lora-targets q_proj,v_proj"
	return a, nil
}

// allLinear is PEFT's word for all linear modules but the head.
const allLinear = "all-linear"

// check refuses parts of a shorthand that say nothing without another part.
func (s Shorthand) check() error {
	switch {
	case s.ZeRO == "" && len(s.ZeROOffload) > 0:
		return fault.Inputf("--zero-offload is given without --zero").
			WithHint("add --zero with a stage, or set the offloading in the file that configures DeepSpeed")
	case slices.Contains(s.ZeROOffload, OffloadedParameters) && s.ZeRO != partitionsParameters:
		return fault.Inputf("--zero-offload parameters needs --zero 3: at stage %s every rank keeps all parameters",
			s.ZeRO).WithHint("give --zero 3, or --zero-offload optimizer")
	case s.LoRA == 0 && s.QLoRA == 0 && len(s.LoRATargets) > 0:
		return fault.Inputf("--lora-targets is given without --lora").
			WithHint("add --lora with a rank, or set target_modules in the file of the adapter")
	}
	return nil
}
