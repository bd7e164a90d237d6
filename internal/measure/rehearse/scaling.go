//go:build linux

package rehearse

import (
	"cmp"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/state/optim"
)

// LossScaling holds the settings of the loss scaler, by DeepSpeed's names. A nil setting comes from the recipe, or is
// the default.
type LossScaling struct {
	LossScale             *float64 // 0 for a dynamic scale
	InitialScalePower     *int
	LossScaleWindow       *int64
	Hysteresis            *int
	ConsecutiveHysteresis *bool
	MinLossScale          *float64
}

// apply applies the settings that were given. The loss is scaled where gradients are in fp16: in the arena, or in the
// backward pass.
func (l LossScaling) apply(j *Job) error {
	given, dynamic := "", "" // a flag of each kind
	set(&given, "--loss-scale", &j.LossScaler.Static, l.LossScale)
	set(&dynamic, "--initial-scale-power", &j.LossScaler.InitialScalePower, l.InitialScalePower)
	set(&dynamic, "--loss-scale-window", &j.LossScaler.Window, l.LossScaleWindow)
	set(&dynamic, "--hysteresis", &j.LossScaler.Hysteresis, l.Hysteresis)
	set(&dynamic, "--consecutive-hysteresis", &j.LossScaler.ConsecutiveHysteresis, l.ConsecutiveHysteresis)
	set(&dynamic, "--min-loss-scale", &j.LossScaler.Minimum, l.MinLossScale)
	switch {
	case !j.ScalesLoss() && given+dynamic != "":
		return fault.Inputf("%s is given, but gradients are %v: only fp16 gradients need loss scaling",
			cmp.Or(given, dynamic), j.Format.Gradient).WithHint("--precision fp16")
	case !j.ScalesLoss():
		j.LossScaler = optim.LossScaler{Static: 1}
	case j.LossScaler.Static != 0 && dynamic != "":
		return fault.Inputf("%s is given, but the loss scale is fixed at %g", dynamic, j.LossScaler.Static).
			WithHint("--loss-scale 0 makes it dynamic")
	}
	if err := j.LossScaler.Validate(); err != nil {
		bad := &fault.Input{What: "loss scaling", Err: err}
		if j.Recipe != nil && given+dynamic == "" {
			bad.Where.File = j.Recipe.File
		}
		return bad
	}
	return nil
}

// set copies a setting that was given, and records its flag.
func set[T any](flag *string, name string, to, given *T) {
	if given != nil {
		*to, *flag = *given, name
	}
}

// ScalesLoss reports whether gradients are in fp16, so that the loss is scaled.
func (j *Job) ScalesLoss() bool {
	return j.Format.Parameter == dtype.F16 || j.Format.Gradient == dtype.F16
}
