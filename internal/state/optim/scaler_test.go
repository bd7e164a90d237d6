package optim

import (
	"errors"
	"slices"
	"testing"
)

// run feeds a scaler steps, 'x' for an overflow, and returns the scale after
// each.
func run(t *testing.T, l LossScaler, steps string) (scales []float64, err error) {
	if err := l.Validate(); err != nil {
		t.Fatal(err)
	}
	for _, step := range steps {
		if err := l.Update(step == 'x'); err != nil {
			return scales, err
		}
		scales = append(scales, l.Scale())
	}
	return scales, nil
}

// The sequences come from DeepSpeed's DynamicLossScaler (0.19.6).
func TestLossScaler(t *testing.T) {
	dynamic := LossScaler{InitialScalePower: 4, Window: 2, Hysteresis: 2, Minimum: 1}
	consecutive := dynamic
	consecutive.ConsecutiveHysteresis = true
	impatient := dynamic
	impatient.Hysteresis = 1
	for _, test := range []struct {
		name   string
		scaler LossScaler
		steps  string
		want   []float64
	}{
		{"static", LossScaler{Static: 128}, "x.x", []float64{128, 128, 128}},
		{"doubles after a window, not at the first step", dynamic, ".....", []float64{16, 16, 32, 32, 64}},
		{"the first overflow costs patience", dynamic, "xx", []float64{16, 8}},
		{"patience is not refilled by one good step", dynamic, "x.x", []float64{16, 16, 8}},
		{"unless consecutive", consecutive, "x.x", []float64{16, 16, 16}},
		{"patience is refilled when the scale doubles", dynamic, "x...x", []float64{16, 16, 16, 32, 32}},
		{"no patience", impatient, "xx.x", []float64{8, 4, 4, 2}},
	} {
		if got, err := run(t, test.scaler, test.steps); err != nil || !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, %v; want %v", test.name, got, err, test.want)
		}
	}
}

func TestLossScalerEndsAtTheMinimum(t *testing.T) {
	l := LossScaler{InitialScalePower: 2, Window: 10, Hysteresis: 1, Minimum: 1}
	got, err := run(t, l, "xxxx")
	if !errors.Is(err, ErrMinimumScale) || !slices.Equal(got, []float64{2, 1}) {
		t.Errorf("%v, %v", got, err)
	}
}

func TestLossScalerStartsAtItsPower(t *testing.T) {
	l := DefaultLossScaler()
	if l.Scale() != 65536 {
		t.Errorf("the first scale is %g", l.Scale())
	}
	for _, bad := range []LossScaler{{}, {Static: -1}, {InitialScalePower: 200, Window: 1, Hysteresis: 1, Minimum: 1},
		{Window: 1, Minimum: 1}, {Window: 1, Hysteresis: 1}} {
		if bad.Validate() == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
}
