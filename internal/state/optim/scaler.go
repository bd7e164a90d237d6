package optim

import (
	"errors"
	"fmt"
	"math"
)

// LossScaler chooses the loss scale, so that fp16 gradients neither vanish nor
// overflow. Its rules and names are DeepSpeed's (runtime/fp16/loss_scaler.py,
// DynamicLossScaler).
type LossScaler struct {
	// Static is a scale that never changes; 0 for a dynamic one.
	Static float64
	// InitialScalePower: the first scale is 2 to this power.
	InitialScalePower int
	// Window is the number of steps without overflow after which the scale
	// doubles.
	Window int64
	// Hysteresis is the number of overflows that it takes to halve the scale.
	Hysteresis int
	// ConsecutiveHysteresis refills the hysteresis after each step without
	// overflow, not only when the scale doubles.
	ConsecutiveHysteresis bool
	// Minimum is the smallest scale. An overflow at that scale is an error.
	Minimum float64

	scale        float64
	patience     int   // overflows left before the scale is halved
	steps        int64 // seen
	lastOverflow int64 // the step of the last overflow
}

// DefaultLossScaler returns a scaler with DeepSpeed's defaults.
func DefaultLossScaler() LossScaler {
	return LossScaler{InitialScalePower: 16, Window: 1000, Hysteresis: 2, Minimum: 1}
}

// ErrMinimumScale says that gradients overflow even at the smallest scale: the
// training has diverged.
var ErrMinimumScale = errors.New("gradients overflow at the minimum loss scale")

// Validate refuses values that make no sense. Its errors use DeepSpeed's names.
func (l *LossScaler) Validate() error {
	switch {
	case l.Static != 0 && !isScale(l.Static):
		return fmt.Errorf("loss_scale is %g: expected a number from 2^%d to 2^%d, or 0 for a dynamic one",
			l.Static, -largestPower-1, largestPower)
	case l.Static > 0:
		return nil
	case l.InitialScalePower < 0 || l.InitialScalePower > largestPower:
		return fmt.Errorf("initial_scale_power is %d: expected 0 to %d", l.InitialScalePower, largestPower)
	case l.Window < 1:
		return fmt.Errorf("loss_scale_window is %d: expected at least 1 step", l.Window)
	case l.Hysteresis < 1:
		return fmt.Errorf("hysteresis is %d: expected at least 1 overflow", l.Hysteresis)
	case !isScale(l.Minimum):
		return fmt.Errorf("min_loss_scale is %g: expected a positive number", l.Minimum)
	case l.Minimum > l.Scale():
		return fmt.Errorf("min_loss_scale is %g, and the first scale is 2^%d: expected at most that",
			l.Minimum, l.InitialScalePower)
	}
	return nil
}

// largestPower is the power of the largest scale whose inverse is a normal number of
// fp32. The kernels unscale with the inverse and take denormals for zeros.
const largestPower = 126

func isScale(x float64) bool { return x >= 0x1p-127 && x <= 0x1p126 }

// Scale returns the scale of the next loss.
func (l *LossScaler) Scale() float64 {
	switch {
	case l.Static > 0:
		return l.Static
	case l.scale == 0: // nothing was seen yet
		return math.Exp2(float64(l.InitialScalePower))
	}
	return l.scale
}

// Update takes note of a step. It returns [ErrMinimumScale] for an overflow at the
// smallest scale.
func (l *LossScaler) Update(overflow bool) error {
	if l.Static > 0 {
		return nil
	}
	if l.scale == 0 {
		l.scale, l.patience, l.lastOverflow = l.Scale(), l.Hysteresis, -1
	}
	defer func() { l.steps++ }()
	if overflow {
		l.lastOverflow = l.steps
		if l.patience > 1 {
			l.patience--
			return nil
		}
		if l.scale <= l.Minimum {
			return fmt.Errorf("%w, %g", ErrMinimumScale, l.Minimum)
		}
		l.scale = max(l.scale/2, l.Minimum)
		return nil
	}
	if l.ConsecutiveHysteresis {
		l.patience = l.Hysteresis
	}
	if stable := l.steps - l.lastOverflow - 1; stable > 0 && stable%l.Window == 0 {
		l.patience = l.Hysteresis
		l.scale *= 2
	}
	return nil
}
