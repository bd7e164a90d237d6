package megatron

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"plimsoll/internal/input/parallel"
	"plimsoll/internal/input/recipe"
)

// form is how tensor parallel ranks divide a linear layer.
type form string

const (
	column form = "column" // by its outputs
	row    form = "row"    // by its inputs
	full   form = "full"   // every rank has all of it
)

// forms are those of the linear layers that adapters are planned for.
var forms = map[string]form{"linear_qkv": column, "linear_proj": row, "linear_fc1": column, "linear_fc2": row,
	"linear_q_proj": column, "linear_q_up_proj": column, "linear_kv_up_proj": column, "linear_q_down_proj": full,
	"linear_kv_down_proj": full}

// nameOf returns the last part of the path of a module.
func nameOf(path string) string { return path[strings.LastIndexByte(path, '.')+1:] }

// adapted is a linear layer with an adapter.
type adapted struct {
	path   string
	form   form
	expert bool
}

// AdapterParts returns the names of the adapters of a linear layer: one, or one for each projection that it joins.
func (j *Job) AdapterParts(name string) []string {
	if j.Adapter == nil {
		return nil
	}
	switch last := nameOf(name); {
	case j.Adapter.Canonical && last == "linear_qkv":
		return []string{"adapter_q", "adapter_k", "adapter_v"}
	case j.Adapter.Canonical && last == "linear_fc1" && !expertNumber.MatchString(name):
		return []string{"adapter_up", "adapter_gate"}
	}
	return []string{"adapter"}
}

// partWidth returns the outputs of an adapter on a rank. Out are those of its layer.
func (j *Job) partWidth(part string, out int64) int64 {
	switch part {
	case "adapter_q":
		return j.QueryHeads() * j.HeadSize
	case "adapter_k", "adapter_v":
		return j.KeyHeads() * j.HeadSize
	case "adapter_up", "adapter_gate":
		return out / 2
	}
	return out
}

var expertNumber = regexp.MustCompile(`^mlp\.experts\.(\d+)\.`)

// path returns the path of a linear layer's module. Experts that are joined have one.
func (l *lister) path(name string) string {
	if n := expertNumber.FindStringSubmatch(name); n != nil {
		module := "mlp.experts."
		if !l.GroupedGEMM {
			module += "local_experts." + n[1] + "."
		}
		name = module + nameOf(name)
	}
	return "decoder." + l.prefix + name
}

// adapt adds the adapters of a linear layer with so many inputs and outputs on a rank.
func (l *lister) adapt(name string, in, out int64) {
	a, is := l.Adapter, forms[nameOf(name)]
	if a == nil || is == "" || !a.Targets(l.path(name)) {
		return
	}
	number := expertNumber.FindStringSubmatch(name)
	if number != nil && number[1] != "0" && l.GroupedGEMM && !a.ByExpert {
		return // the rank's experts share the adapter of the first
	}
	l.adapted = append(l.adapted, adapted{l.path(name), is, number != nil})
	ranks := l.Degrees.Tensor
	if number != nil {
		ranks = l.Degrees.ExpertTensor
	}
	for _, part := range l.AdapterParts(name) {
		first, second := a.Rank*in, a.Rank*l.partWidth(part, out)
		if a.Program == recipe.BridgeTuner { // divides the matrix that layers of others have in full
			if is != row {
				first /= ranks
			}
			if is != column {
				second /= ranks
			}
		}
		at := l.prefix + name + "." + part
		l.list = append(l.list, Parameter{Name: at + ".A", Elements: first, Weight: true},
			Parameter{Name: at + ".B", Elements: second, Weight: true})
	}
}

// copied adds the copy of a matrix that is trained in its place.
func (l *lister) copied(name string) {
	if l.Adapter == nil || !slices.Contains(l.Adapter.Trained, nameOf(name)) {
		return
	}
	original := l.list[len(l.list)-1]
	l.list = append(l.list, Parameter{Name: TrainedCopy(name), Elements: original.Elements, Weight: true})
}

// TrainedCopy returns the name of the copy of a matrix that is trained in its place.
func TrainedCopy(name string) string { return name + ".modules_to_save.weight" }

// adapters checks what the adapters need.
func (j *Job) adapters() error {
	a := j.Adapter
	if a == nil {
		return nil
	}
	const not = "which is not planned yet beside adapters"
	var again []string
	for _, module := range []string{"layernorm", "moe_act", "mla_up_proj"} {
		if j.Recomputes(module) {
			again = append(again, module)
		}
	}
	switch {
	case j.Kind != GPT:
		return a.At.Inputf("adapters on a %s are not planned yet", j.Kind)
	case j.Predictions > 0:
		return j.Fault("mtp_num_layers", fmt.Sprintf("is %d, %s", j.Predictions, not), "")
	case j.FP8 != "":
		return j.Fault("fp8_format", fmt.Sprintf("is %s, %s", j.FP8, not), "")
	case len(again) > 0:
		return j.Fault("recompute_modules", fmt.Sprintf("has %s, %s", strings.Join(again, ", "), not), "")
	case len(a.Trained) > 0 && !j.Untied:
		return a.At.Inputf("modules_to_save has %s, and the embedding and the output layer share their weight, %s",
			strings.Join(a.Trained, ", "), not)
	}
	return j.adaptedLayers()
}

// adaptedLayers checks the layers that are adapted.
func (j *Job) adaptedLayers() error {
	a, l := j.Adapter, &lister{Job: j}
	for _, chunks := range j.Table {
		for _, c := range chunks {
			for i, layer := range j.OnStage(c) {
				if router := fmt.Sprintf("decoder.layers.%d.mlp.router", i); layer.Mixture && a.Says(router) {
					return a.At.Inputf("the adapters are on routers, too, which is not planned yet")
				}
			}
			l.adapted = append(l.adapted, j.adaptedOf(c)...)
		}
	}
	if len(l.adapted) == 0 {
		return a.At.Inputf("the adapters are on no linear layer of the model").
			WithHint("name linear layers of Megatron core, such as linear_qkv and linear_proj")
	}
	for _, layer := range l.adapted {
		ranks := j.Degrees.Tensor
		if layer.expert {
			ranks = j.Degrees.ExpertTensor
		}
		switch {
		case a.Program == recipe.SwiftTuner && layer.expert && ranks > 1:
			return a.At.Inputf("%s is adapted, and expert tensor parallel is %d", layer.path, ranks).
				WithHint("ms-swift asserts that experts with adapters have no tensor parallelism: " +
					"--expert_tensor_parallel_size 1")
		case a.Canonical && layer.expert && !j.GroupedGEMM:
			return a.At.Inputf("CanonicalLoRA on experts one after the other is not planned yet").
				WithHint("plimsoll plans it with moe_grouped_gemm")
		case a.Program == recipe.BridgeTuner && layer.form != row && a.Rank%ranks != 0:
			return a.At.Inputf("the rank of the adapter of %s is %d, no multiple of tensor parallel %d", layer.path,
				a.Rank, ranks).WithHint("Megatron core asserts this: every rank has an equal part")
		}
	}
	return nil
}

// adaptedOf returns the layers of a chunk that are adapted.
func (j *Job) adaptedOf(c parallel.Chunk) []adapted { return j.listed(c).adapted }

// Trained returns the elements of all parameters that are trained.
func (j *Job) Trained() (sum int64) {
	whole := j.undivided()
	for _, chunks := range j.Table {
		for _, c := range chunks {
			for _, p := range whole.Parameters(c) {
				if !p.Frozen {
					sum += p.Elements
				}
			}
		}
	}
	return sum
}
