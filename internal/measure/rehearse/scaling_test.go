//go:build linux

package rehearse

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/synthetic"
)

func pointer[T any](x T) *T { return &x }

// begun returns a training with its first weights. Its model has outliers in every step of every rank.
func begun(t *testing.T, r Request) *training {
	j := resolve(t, r)
	j.Model = small(1_000_003)
	p, err := NewPlacement(j, hostWith(t, ledger.GiB))
	if err != nil {
		t.Fatal(err)
	}
	b, err := p.begin()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.close(); err != nil {
			t.Error(err)
		}
	})
	b.each(func(s *engine.Shard, first int64, c kernel.Chunk) { synthetic.Weights(s.Config().Rank, first, c) })
	return b
}

// checksums returns a checksum of everything that a step updates, chunk by chunk.
func checksums(t *training) map[string]uint64 {
	sums := map[string]uint64{}
	var mutex sync.Mutex
	t.each(func(s *engine.Shard, first int64, c kernel.Chunk) {
		h := fnv.New64a()
		for _, stream := range []any{c.Parameter, c.Low, c.LowBytes, c.Master, c.Moments[0].Data, c.Moments[1].Data,
			c.Headers} {
			if err := binary.Write(h, binary.LittleEndian, stream); err != nil {
				panic(err)
			}
		}
		mutex.Lock()
		defer mutex.Unlock()
		sums[fmt.Sprintf("rank %d, element %d", s.Config().Rank, first)] = h.Sum64()
	})
	return sums
}

// differing returns the chunks that differ.
func differing(a, b map[string]uint64) []string {
	var found []string
	for chunk := range a {
		if a[chunk] != b[chunk] {
			found = append(found, chunk)
		}
	}
	return found
}

// TestOverflowFollowsTheScale: 3 times 2^15 overflows fp16. A step that overflows leaves every byte of the state and
// the step counter alone. Other steps change every chunk.
func TestOverflowFollowsTheScale(t *testing.T) {
	for name, test := range map[string]struct {
		scaling LossScaling
		steps   string // x for a skipped step
		scales  []float64
	}{
		"DeepSpeed's defaults": {LossScaling{}, "xxx..", []float64{65536, 65536, 32768, 16384, 16384}},
		"no patience":          {LossScaling{Hysteresis: pointer(1)}, "xx..", []float64{65536, 32768, 16384, 16384}},
		"small":                {LossScaling{InitialScalePower: pointer(4)}, "...", []float64{16, 16, 16}},
		"grows until it overflows": {
			LossScaling{InitialScalePower: pointer(13), LossScaleWindow: pointer(int64(2)), Hysteresis: pointer(1)},
			".....x...x", []float64{8192, 8192, 8192, 16384, 16384, 32768, 16384, 16384, 16384, 32768},
		},
		"patience refilled": {
			LossScaling{InitialScalePower: pointer(14), LossScaleWindow: pointer(int64(1)),
				ConsecutiveHysteresis: pointer(true)},
			"..xx..", []float64{16384, 16384, 32768, 32768, 16384, 16384},
		},
		"fixed, too large": {LossScaling{LossScale: pointer(40000.0)}, "xx", []float64{40000, 40000}},
		"fixed":            {LossScaling{LossScale: pointer(1000.0)}, "..", []float64{1000, 1000}},
	} {
		t.Run(name, func(t *testing.T) {
			b := begun(t, Request{Ranks: 2, Precision: "fp16", LossScaling: test.scaling})
			steps, scales, made := "", []float64{}, int64(0)
			for i := range test.scales {
				before := checksums(b)
				step, err := b.step(i)
				if err != nil {
					t.Fatal(err)
				}
				changed := len(differing(before, checksums(b)))
				switch {
				case step.Skipped:
					steps += "x"
					if changed > 0 || step.UpdateSeconds != 0 || step.TrafficSeconds != 0 {
						t.Errorf("step %d was skipped and changed %d chunks: %+v", i, changed, step)
					}
				default:
					steps += "."
					made++
					if changed != len(before) {
						t.Errorf("step %d changed %d of %d chunks", i, changed, len(before))
					}
				}
				if b.engine.Steps() != made {
					t.Errorf("after step %d the counter is %d, want %d", i, b.engine.Steps(), made)
				}
				scales = append(scales, step.LossScale)
			}
			if steps != test.steps || !slices.Equal(scales, test.scales) {
				t.Errorf("%s with scales %v, want %s with %v", steps, scales, test.steps, test.scales)
			}
		})
	}
}

// TestScaleLeavesNoTrace: fp16 gradients times a power of two are exact. So the states are equal to the bit, and the
// norms are those of unscaled gradients.
func TestScaleLeavesNoTrace(t *testing.T) {
	for _, gradients := range []string{"fp16", "fp32"} {
		one := begun(t, Request{Ranks: 2, Precision: "fp16", GradientType: gradients,
			LossScaling: LossScaling{LossScale: pointer(1.0)}})
		many := begun(t, Request{Ranks: 2, Precision: "fp16", GradientType: gradients, LossScaling: LossScaling{
			InitialScalePower: pointer(10), LossScaleWindow: pointer(int64(1))}})
		for i := range 4 {
			a, err := one.step(i)
			b, e := many.step(i)
			if err := errors.Join(err, e); err != nil {
				t.Fatal(err)
			}
			if a.GradientNorm != b.GradientNorm || a.LossScale == b.LossScale {
				t.Errorf("step %d: %+v and %+v", i, a, b)
			}
		}
		if d := differing(checksums(one), checksums(many)); d != nil {
			t.Errorf("%s gradients: states differ in %v", gradients, d)
		}
	}
}

// TestSkippedStepsAreAsIfTheyHadNotBeen compares with a training that has only the gradients of the other steps.
func TestSkippedStepsAreAsIfTheyHadNotBeen(t *testing.T) {
	with := begun(t, Request{Ranks: 1, Precision: "fp16"})
	without := begun(t, Request{Ranks: 1, Precision: "fp16", LossScaling: LossScaling{InitialScalePower: pointer(14)}})
	for i := range 6 {
		step, err := with.step(i)
		if err == nil && !step.Skipped {
			step, err = without.step(i)
		}
		if err != nil || step.Skipped != (i < 3) {
			t.Fatalf("step %d: %+v, %v", i, step, err)
		}
	}
	if d := differing(checksums(with), checksums(without)); d != nil || with.engine.Steps() != without.engine.Steps() {
		t.Errorf("states differ in %v, at steps %d and %d", d, with.engine.Steps(), without.engine.Steps())
	}
}

// TestRunCountsWhatItSkips checks the measurement.
func TestRunCountsWhatItSkips(t *testing.T) {
	j := resolve(t, Request{Ranks: 1, Steps: 5, Precision: "fp16"})
	j.Model = small(1_000_003)
	p, err := NewPlacement(j, hostWith(t, ledger.GiB))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // a plan can be run again
		m, err := p.Run(context.Background(), silent{})
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Steps) != 5 || m.Updates != 2 || m.LossScale != 16384 || !m.Steps[2].Skipped || m.Steps[3].Skipped {
			t.Errorf("%+v", m)
		}
	}
}

// TestRunEndsAtTheMinimum: Run ends at the least scale, as DeepSpeed does.
func TestRunEndsAtTheMinimum(t *testing.T) {
	j := resolve(t, Request{Ranks: 1, Steps: 5, Precision: "fp16",
		LossScaling: LossScaling{MinLossScale: pointer(32768.0)}})
	j.Model = small(1_000_003)
	p, err := NewPlacement(j, hostWith(t, ledger.GiB))
	if err != nil {
		t.Fatal(err)
	}
	m, err := p.Run(context.Background(), silent{})
	if m != nil || !errors.As(err, new(*fault.Input)) || !errors.Is(err, optim.ErrMinimumScale) ||
		!strings.Contains(err.Error(), "step 3: ") {
		t.Errorf("%v, %v", m, err)
	}
}

// TestKnobsOfLossScaling: settings come from flags, then the recipe, then DeepSpeed's defaults.
func TestKnobsOfLossScaling(t *testing.T) {
	write := func(text string) string {
		path := filepath.Join(t.TempDir(), "ds.json")
		text = `{"train_batch_size": 1, ` + text +
			`, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}`
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const knobs = `"loss_scale": 0, "initial_scale_power": 20, "loss_scale_window": 7, "hysteresis": 3, "consecutive_hysteresis": true, "min_loss_scale": 4`
	of := optim.LossScaler{InitialScalePower: 20, Window: 7, Hysteresis: 3, ConsecutiveHysteresis: true, Minimum: 4}
	mixed := of
	mixed.Hysteresis, mixed.Window, mixed.ConsecutiveHysteresis = 1, 9, false
	unscaled := optim.LossScaler{Static: 1}
	for name, test := range map[string]struct {
		request Request
		want    optim.LossScaler
	}{
		"no recipe":      {Request{Precision: "fp16"}, optim.DefaultLossScaler()},
		"bf16":           {Request{}, unscaled},
		"fp32":           {Request{Precision: "fp32"}, unscaled},
		"fp16 gradients": {Request{GradientType: "fp16"}, optim.DefaultLossScaler()},
		"fp32 gradients": {Request{Precision: "fp16", GradientType: "fp32"}, optim.DefaultLossScaler()},
		"recipe":         {Request{DeepSpeed: write(`"fp16": {"enabled": true, ` + knobs + `}`)}, of},
		"recipe in bf16": {Request{DeepSpeed: write(`"bf16": {"enabled": true}, "fp16": {"enabled": false, ` +
			knobs + `}`)}, unscaled},
		"left open, fp16": {Request{Precision: "fp16",
			DeepSpeed: write(`"fp16": {"enabled": "auto", ` + knobs + `}`)}, of},
		"left open": {Request{DeepSpeed: write(`"fp16": {"enabled": "auto", ` + knobs + `}`)}, unscaled},
		"flags go before": {Request{DeepSpeed: write(`"fp16": {"enabled": true, ` + knobs + `}`),
			LossScaling: LossScaling{Hysteresis: pointer(1), LossScaleWindow: pointer(int64(9)),
				ConsecutiveHysteresis: pointer(false)}}, mixed},
		"fixed by recipe": {Request{DeepSpeed: write(`"fp16": {"enabled": true, "loss_scale": 128}`)},
			optim.LossScaler{Static: 128, InitialScalePower: 16, Window: 1000, Hysteresis: 2, Minimum: 1}},
		"dynamic by flags": {Request{DeepSpeed: write(`"fp16": {"enabled": true, "loss_scale": 128}`),
			LossScaling: LossScaling{LossScale: pointer(0.0), Hysteresis: pointer(2)}}, optim.DefaultLossScaler()},
	} {
		test.request.Ranks = 1
		if j := resolve(t, test.request); j.LossScaler != test.want || j.ScalesLoss() == (test.want == unscaled) {
			t.Errorf("%s: %+v, want %+v", name, j.LossScaler, test.want)
		}
	}
	bf16, fp16, fixed := write(`"bf16": {"enabled": true}`), write(`"fp16": {"enabled": true}`),
		write(`"fp16": {"enabled": true, "loss_scale": 128}`)
	for want, request := range map[string]Request{
		`--precision is "int8": expected`:                   {Precision: "int8"},
		`DeepSpeed trains in bf16, but --precision is fp16`: {Precision: "fp16", DeepSpeed: bf16},
		`--hysteresis is given, but gradients are bf16`:     {LossScaling: LossScaling{Hysteresis: pointer(2)}},
		`--loss-scale is given, but gradients are fp32`: {Precision: "fp32",
			LossScaling: LossScaling{LossScale: pointer(2.0)}},
		`--min-loss-scale is given, but the loss scale is fixed`: {DeepSpeed: fixed,
			LossScaling: LossScaling{MinLossScale: pointer(2.0)}},
		`hysteresis is 0: expected at least 1`: {DeepSpeed: fp16,
			LossScaling: LossScaling{Hysteresis: pointer(0)}},
		`loss_scale is -1: expected`: {Precision: "fp16",
			LossScaling: LossScaling{LossScale: pointer(-1.0)}},
		`loss_scale_window is 0`: {Precision: "fp16",
			LossScaling: LossScaling{LossScaleWindow: pointer(int64(0))}},
		`initial_scale_power is 128`: {Precision: "fp16",
			LossScaling: LossScaling{InitialScalePower: pointer(128)}},
		`min_loss_scale is 32, and the first scale is 2^4`: {Precision: "fp16",
			LossScaling: LossScaling{InitialScalePower: pointer(4), MinLossScale: pointer(32.0)}},
		`ds.json: loss scaling: hysteresis is -1`: {Precision: "fp16",
			DeepSpeed: write(`"fp16": {"enabled": "auto", "hysteresis": -1}`)},
	} {
		request.Model, request.Ranks = "gpt2", 1
		if _, err := request.Resolve(); !errors.As(err, new(*fault.Input)) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
