package axolotl

import (
	"fmt"
	"slices"
	"strings"
)

// plugins reads the plugins that change the model or the passes: src/axolotl/integrations.
func (r *reader) plugins() error {
	v := r.Find("plugins")
	if v == nil {
		return nil
	}
	for _, e := range v.Elements {
		name := e.Text[strings.LastIndexByte(e.Text, '.')+1:]
		switch {
		case name == "KernelsPlugin":
			if err := r.kernels(); err != nil {
				return err
			}
		case slices.Contains(plannedPlugins, name):
		default:
			return r.Inputf(e.At, "plugins holds %s, which may change the model or the passes", e).
				WithHint("remove it to plan the job without it")
		}
	}
	return nil
}

// plannedPlugins change the loss and kernels that keys ask for, log, or evaluate after the training.
var plannedPlugins = strings.Fields("LigerPlugin CutCrossEntropyPlugin SwanLabPlugin LMEvalPlugin")

// kernels reads how experts run: check_experts_implementation in src/axolotl/integrations/kernels/args.py.
func (r *reader) kernels() error {
	if err := r.Unplanned("its kernels keep other tensors", unplannedKernels); err != nil {
		return err
	}
	const key = "experts_implementation"
	scatter := r.Truth("use_scattermoe") || r.Word("expert_backend") == "scattermoe"
	sonic := r.Truth("use_sonicmoe") || r.Word("expert_backend") == "sonicmoe"
	switch name := r.Word(key); {
	case name == "batched_mm" || strings.HasPrefix(name, "deep_ep"):
		return r.Fault(key, fmt.Sprintf("is %s, which is not planned yet", name), "use grouped_mm or scattermoe")
	case scatter && sonic:
		return r.Fault("use_scattermoe", "is true beside use_sonicmoe, which axolotl refuses",
			"set one of the two to false")
	case scatter && r.Gives("moe_bnb_fast") && !r.Truth("moe_bnb_fast"):
		return r.Fault("moe_bnb_fast", "is false: experts are dequantized in chunks, which is not planned yet",
			"set it to true")
	case scatter && (name == "" || name == "scattermoe"):
		r.To.ScattersExperts = true
	case sonic && (name == "" || name == "sonicmoe"):
		r.Note("use_sonicmoe", "has kernels for experts, which the plan takes for torch's grouped products")
	case name == "":
		r.Note("plugins", "holds KernelsPlugin: experts run one by one, which the plan takes for torch's grouped "+
			"products; the backward pass may take one more gradient of all experts of a layer")
	}
	return nil
}
