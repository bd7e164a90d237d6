package job

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// Optimizer is the optimizer of a job: a kind in one of its variants.
type Optimizer struct {
	Name    string
	Variant Variant
	// States returns the states of a parameter, with their names in torch.optim. They may differ for small tensors.
	States func(p *autograd.Parameter) []State
	// Ranks are those that share a matrix under FSDP2, 0 without.
	Ranks int64
	// Managed means that states are in CUDA's managed memory (paged optimizers), outside torch's allocator.
	Managed bool
	lowRank *lowRank // of GaLore and APOLLO, nil for others
	kind    *optimizerKind
}

// State is one state tensor.
type State struct {
	Name  string
	Bytes int64
}

// Variant is the implementation of a step in torch.optim.
type Variant string

// The variants.
const (
	Foreach Variant = "foreach"
	Fused   Variant = "fused"
	Loop    Variant = "for-loop"
)

// optimizerName returns the name and the variant of the optimizer that the request and the files ask for, and the place
// of the name.
func (r *resolver) optimizerName() (name, variant string, where fault.Position) {
	name, variant, _ = strings.Cut(r.Optimizer, "/")
	if d := r.job.DeepSpeed; name == "" && d != nil && d.Optimizer != nil {
		name, where.File = strings.ToLower(d.Optimizer.Type), d.File
	}
	if f := r.Inputs.framework; name == "" && f != nil {
		name, where.File = f.Optimizer, f.File
	}
	if name == "" && r.training != nil { // the Trainer's, unless DeepSpeed has one
		name, where.File = r.trainersOptimizer(), r.training.File
	}
	if name == dion && r.job.FSDP == nil && r.Request.FSDP == "" { // axolotl takes the one or the other
		name = moonlight
	}
	return name, variant, where
}

// trainersOptimizer returns the Trainer's optimizer, which depends on releases where no file names it: default_optim in
// training_args.py of transformers 4.31, 4.32, 4.53 and 4.54.
func (r *resolver) trainersOptimizer() string {
	o, v := r.training.Optimizer, r.job.Versions
	if f := r.Inputs.framework; !o.Assumed || f != nil && f.Optimizer != "" {
		return o.Name
	}
	name := "adamw_torch"
	switch {
	case !v.Transformers.AtLeast(4, 32, 0):
		name = "adamw_hf"
	case v.Transformers.AtLeast(4, 54, 0) && v.Torch.AtLeast(2, 8, 0):
		return o.Name
	}
	r.assume("optim is %s: the Trainer's default in transformers %v with torch %v", name, v.Transformers, v.Torch)
	return name
}

// optimizer sets the optimizer, its variant and the gradient clipping.
func (r *resolver) optimizer() (err error) {
	name, variant, where := r.optimizerName()
	if name == ServiceOptimizer {
		name, variant = "adamw", ""
	}
	if name == "" {
		name = "adamw"
		r.assume("AdamW: --optimizer was not given")
	}
	o, ok := optimizerNames[name]
	if !ok {
		return unplannedOptimizer(where, name)
	}
	if r.forcesCPUAdam() && !o.kind.ofDeepSpeed {
		if on := onCPU[o.Name]; on == "" {
			r.assume("DeepSpeedCPUAdam with states in fp32 in place of %s: accelerate replaces an optimizer that is "+
				"offloaded, unless DeepSpeed's file sets zero_force_ds_cpu_optimizer to false", name)
			o, variant = optimizerNames["adam"], ""
		} else if on != o.Name {
			o, variant = optimizerNames[on], ""
		}
	}
	if variant != "" {
		if err := o.kind.checkVariant(Variant(variant)); err != nil {
			return err
		}
		o.Variant = Variant(variant)
	}
	if d := r.job.DeepSpeed; o.Variant == "" && d != nil && d.Optimizer.IsFusedAdam() &&
		strings.HasPrefix(o.Name, "adam") {
		o.Variant = Fused
	}
	if o.Variant == "" { // torch's defaults
		o.Variant = Foreach
		if r.job.OnCPU {
			o.Variant = Loop
		}
	}
	if o.kind.choose != nil {
		err = o.kind.choose(r, &o)
	}
	r.job.Optimizer = o
	r.job.Clip = 1
	switch {
	case r.job.StepsInBackward: // no gradients are left to clip
		r.job.Clip = 0
	case r.Clip != nil:
		r.job.Clip = *r.Clip
	case r.training != nil:
		r.job.Clip = r.training.MaxGradNorm
	case r.job.DeepSpeed != nil:
		r.job.Clip = r.job.DeepSpeed.GradientClipping
	}
	return err
}

// forcesCPUAdam reports whether an offloaded optimizer becomes one of DeepSpeed's own. DeepSpeed refuses others
// (_configure_optimizer in its runtime/engine.py), and accelerate replaces them before
// (map_pytorch_optim_to_deepspeed in its utils/deepspeed.py).
func (r *resolver) forcesCPUAdam() bool {
	d := r.job.DeepSpeed
	return d != nil && d.Optimizer == nil && d.OffloadOptimizer.Device != "none" && !d.KeepsOptimizer
}

// onCPU are the optimizers that have a step of DeepSpeed's for the CPU, with its name.
var onCPU = map[string]string{"adamw": "adamw", "adam": "adam", "adagrad": "adagrad", "adamw-32bit": "adamw",
	"lion-32bit": "lion"}

// checkVariant refuses a variant that an optimizer does not have.
func (k *optimizerKind) checkVariant(wanted Variant) error {
	known := []Variant{Foreach, Fused, Loop}
	hint := "leave it out: " + k.name + " has only one implementation"
	if len(k.variants) > 0 {
		hint = fmt.Sprintf("expected %v", joined(k.variants))
	}
	switch {
	case !slices.Contains(known, wanted):
		return fault.Inputf("unknown variant %q of the optimizer %s", wanted, k.name).WithHint(hint)
	case !slices.Contains(k.variants, wanted):
		return fault.Inputf("the optimizer %s has no variant %s", k.name, wanted).WithHint(hint)
	}
	return nil
}

func joined(variants []Variant) string {
	text := ""
	for i, v := range variants {
		if i > 0 {
			text += ", "
		}
		text += string(v)
	}
	return text
}

// optimizerText returns the optimizer as the user spelled it.
func (r *resolver) optimizerText() string {
	if r.Optimizer != "" {
		return r.Optimizer
	}
	return r.job.Optimizer.Name
}

// CountsOnGPU reports whether the number of steps of a parameter is a tensor on the GPU.
func (o *Optimizer) CountsOnGPU(p *autograd.Parameter) bool {
	return o.Variant == Fused && !o.orthogonalizes(p)
}

// Counts reports whether a parameter's number of steps is a part of its state.
func (o *Optimizer) Counts(p *autograd.Parameter) bool {
	return !o.kind.uncounted && !(o.IsMuon() && p.Hidden)
}

// IsTogether reports whether the update of a parameter depends on others: schedule-free's counters are of a group.
func (o *Optimizer) IsTogether() bool { return o.kind.together }

// Compresses reports whether the optimizer exchanges one bit for each number among ranks, beside errors.
func (o *Optimizer) Compresses() bool { return o.kind.compresses }

// IsOfDeepSpeed reports whether only DeepSpeed has the optimizer.
func (o *Optimizer) IsOfDeepSpeed() bool { return o.kind.ofDeepSpeed }

// StepsInBackward reports whether the optimizer updates a parameter as soon as its gradient is complete, and frees the
// gradient.
func (o *Optimizer) StepsInBackward() bool { return o.kind.inBackward }

// Passes returns the sizes of the temporaries at the peak of each pass of a step over the parameters. All optimizers
// but Muon make one pass.
func (o *Optimizer) Passes(parameters []*autograd.Parameter) [][]ledger.Bytes {
	if o.kind.passes != nil {
		return o.kind.passes(o, parameters)
	}
	return [][]ledger.Bytes{o.temporaries(parameters)}
}

// temporaries are as large as all parameters, or as the largest one.
func (o *Optimizer) temporaries(parameters []*autograd.Parameter) []ledger.Bytes {
	var list []ledger.Bytes
	var largest ledger.Bytes
	tensors := o.kind.loopTensors
	for _, p := range parameters {
		bytes := ledger.Bytes(p.Elements * p.DType.Size())
		if o.kind.wide {
			bytes = ledger.Bytes(p.Elements * dtype.F32.Size())
		}
		if bytes > largest {
			largest, tensors = bytes, o.kind.loopTensors
			if p.DType != dtype.F32 {
				tensors += o.kind.converts
			}
		}
		if o.Variant == Foreach {
			for range o.kind.lists {
				list = append(list, bytes)
			}
		}
	}
	if o.Variant == Loop || o.Variant == Foreach && o.kind.lists == 0 {
		for range tensors {
			list = append(list, largest)
		}
	}
	return list
}

// TemporariesWhy describes the temporaries of an optimizer step.
func (o *Optimizer) TemporariesWhy() string {
	switch {
	case o.lowRank != nil:
		return fmt.Sprintf("the step over the matrix that makes the most for a moment: projections to rank %d, what "+
			"is projected back, and singular vectors", o.lowRank.Rank)
	case o.kind.passes != nil || o.Variant == Foreach && o.kind.lists > 0:
		return o.kind.why
	}
	return fmt.Sprintf("temporaries of the step over one parameter at a time (%s)", o.Variant)
}
