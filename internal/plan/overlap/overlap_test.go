package overlap

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel"
)

// equal returns layers that take equally long.
func equal(count int) []Layer {
	layers := make([]Layer, count)
	for i := range layers {
		layers[i] = Layer{fmt.Sprint("layer ", i), 1 / float64(count), float64(i) / float64(count),
			float64(count-i) / float64(count)}
	}
	return layers
}

// withEmbedding puts an embedding before equal layers. It takes a share of the update and no time of a pass.
func withEmbedding(count int, share float64) []Layer {
	layers := equal(count)
	for i := range layers {
		layers[i].Update *= 1 - share
	}
	return slices.Insert(layers, 0, Layer{Name: "embedding", Update: share, Final: 1})
}

// closed is the law for many equal layers.
func closed(s Step) time.Duration {
	switch s.Mode {
	case Forward:
		return max(0, s.Update-s.Forward)
	case Backward, Async:
		return max(0, s.Update-s.Forward-s.Backward)
	}
	return s.Update
}

func durations(most time.Duration) *rapid.Generator[time.Duration] {
	return rapid.Map(rapid.Int64Range(1, int64(most)), func(n int64) time.Duration { return time.Duration(n) })
}

// TestClosedForms: with 256 equal layers the schedule shows what the closed forms say, within one layer.
func TestClosedForms(t *testing.T) {
	layers := equal(256)
	rapid.Check(t, func(t *rapid.T) {
		pass := durations(10 * time.Second)
		s := Step{Layers: layers, Forward: pass.Draw(t, "forward"), Backward: pass.Draw(t, "backward"),
			Update: durations(60*time.Second).Draw(t, "update"),
			Mode:   rapid.SampledFrom([]Mode{None, Forward, Backward, Async}).Draw(t, "mode")}
		layer := (s.Forward+s.Backward+s.Update)/256 + 1000
		if got, want := s.Exposed(), closed(s); got < want-layer || got > want+layer {
			t.Errorf("%+v: %v, the closed form says %v", s, got, want)
		}
	})
}

// TestMoreWorkShowsMore: a longer update never shows less, and a longer pass never shows more.
func TestMoreWorkShowsMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pass := durations(time.Second)
		count := rapid.IntRange(1, 40).Draw(t, "layers")
		s := Step{Layers: withEmbedding(count, rapid.Float64Range(0, 0.9).Draw(t, "embedding")),
			Forward: pass.Draw(t, "forward"), Backward: pass.Draw(t, "backward"), Update: pass.Draw(t, "update"),
			Norm: pass.Draw(t, "norm"), Interval: rapid.IntRange(1, 8).Draw(t, "interval"),
			Important: rapid.Float64Range(0, 1).Draw(t, "important"),
			Mode:      Mode(rapid.SampledFrom(Modes()).Draw(t, "mode"))}
		off := time.Duration(2 * len(s.Layers)) // every share is rounded to nanoseconds
		exposed := s.Exposed()
		if exposed < 0 || exposed > 2*(s.Update+s.Norm) { // ZenFlow's important columns are updated twice
			t.Fatalf("%+v: %v", s, exposed)
		}
		longer := s
		longer.Update += durations(time.Second).Draw(t, "more")
		if longer.Exposed() < exposed-off {
			t.Fatalf("%+v: %v, and %v for an update of %v", s, exposed, longer.Exposed(), longer.Update)
		}
		slower := s
		slower.Forward += durations(time.Second).Draw(t, "more forward")
		if slower.Exposed() > exposed+off {
			t.Fatalf("%+v: %v, and %v for a forward pass of %v", s, exposed, slower.Exposed(), slower.Forward)
		}
	})
}

// TestBestOrder: no order of the layers shows less than the schedule does.
func TestBestOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pass := durations(time.Second)
		s := Step{Mode: Backward, Layers: withEmbedding(3, rapid.Float64Range(0, 0.9).Draw(t, "embedding")),
			Forward: pass.Draw(t, "forward"), Backward: pass.Draw(t, "backward"), Update: pass.Draw(t, "update")}
		order := rapid.Permutation(s.Layers).Draw(t, "order")
		now, late := time.Duration(0), time.Duration(0)
		for _, l := range order { // one after the other, each as soon as it may begin
			now = max(now, part(l.Final, s.Backward)) + part(l.Update, s.Update)
			late = max(late, now-s.Backward-part(l.Needed, s.Forward))
		}
		if best := s.Exposed(); best > late+8 {
			t.Errorf("%+v: %v, but in the order %+v it is %v", s, best, order, late)
		}
	})
}

// TestExposed has cases that are worked out by hand.
func TestExposed(t *testing.T) {
	const ms = time.Millisecond
	for _, test := range []struct {
		name string
		step Step
		want time.Duration
	}{
		{"nothing hides", Step{Mode: None, Layers: equal(4), Forward: 40 * ms, Backward: 80 * ms, Update: 20 * ms},
			20 * ms},
		{"the squares of the last layer show", Step{Mode: None, Layers: equal(4), Forward: 40 * ms,
			Backward: 80 * ms, Update: 20 * ms, Norm: 4 * ms}, 21 * ms},
		{"forward, the first layer shows", Step{Mode: Forward, Layers: equal(4), Forward: 40 * ms, Backward: 80 * ms,
			Update: 40 * ms}, 10 * ms},
		{"forward, the last layer starts at 30 ms and is there at 80 ms", Step{Mode: Forward, Layers: equal(4),
			Forward: 40 * ms, Backward: 80 * ms, Update: 80 * ms}, 50 * ms},
		{"forward, the embedding shows", Step{Mode: Forward, Layers: withEmbedding(100, 0.3), Forward: 100 * ms,
			Backward: 200 * ms, Update: 100 * ms}, 30*ms + 700*time.Microsecond},
		{"backward, the first layer is final last and needed first", Step{Mode: Backward, Layers: equal(4),
			Forward: 40 * ms, Backward: 80 * ms, Update: 40 * ms}, 10 * ms},
		// Layers 3, 2, 1 and 0 are final at 20, 40, 60 and 80 ms. One takes 40 ms, and each stops the one before it
		// half done. So they are done in the opposite order: at 120, 140, 160 and 180 ms, and needed from 80 ms on.
		{"backward, twice the passes", Step{Mode: Backward, Layers: equal(4), Forward: 40 * ms, Backward: 80 * ms,
			Update: 160 * ms}, 70 * ms},
		{"async hides the passes", Step{Mode: Async, Layers: equal(4), Forward: 40 * ms, Backward: 80 * ms,
			Update: 120 * ms}, 0},
		{"async, the embedding is last", Step{Mode: Async, Layers: withEmbedding(4, 0.5), Forward: 40 * ms,
			Backward: 80 * ms, Update: 130 * ms}, 10 * ms},
		{"async, the squares are work, too", Step{Mode: Async, Layers: equal(4), Forward: 40 * ms, Backward: 80 * ms,
			Update: 120 * ms, Norm: 8 * ms}, 8 * ms},
		{"zenflow shows the important columns", Step{Mode: ZenFlow, Layers: equal(4), Forward: 40 * ms,
			Backward: 80 * ms, Update: 120 * ms, Interval: 4, Important: 0.1}, 12 * ms},
		{"zenflow, the mean of four steps", Step{Mode: ZenFlow, Layers: equal(4), Forward: 40 * ms, Backward: 80 * ms,
			Update: 160 * ms, Interval: 4, Important: 0.1}, 26 * ms},
	} {
		if got := test.step.Exposed(); (got - test.want).Abs() > 200 {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}

// TestOneGradientBuffer: an update that is one step late may take both passes although the next gradients replace
// those that it reads, whatever the layers are. Updates go in the order in which gradients arrive.
func TestOneGradientBuffer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		count := rapid.IntRange(1, 30).Draw(t, "layers")
		layers := make([]Layer, count)
		sum := 0.0
		for i := range layers {
			layers[i].Update = rapid.Float64Range(0.01, 1).Draw(t, "update")
			sum += layers[i].Update
		}
		over := 1.0 // of the backward pass, when the layer is final
		for i := range layers {
			layers[i].Update /= sum
			layers[i].Final = over // a backward pass that takes as long for a layer as its update
			over -= layers[i].Update
		}
		s := Step{Mode: Async, Layers: layers, Forward: durations(time.Second).Draw(t, "forward"),
			Backward: durations(time.Second).Draw(t, "backward")}
		s.Update = s.Forward + s.Backward
		if exposed := s.Exposed(); exposed > time.Duration(2*count) {
			t.Errorf("%+v: %v", s, exposed)
		}
	})
}

// TestHostBytes computes the bytes of each format from what its kernel reads and writes.
func TestHostBytes(t *testing.T) {
	const parameters = 1 << 20
	for moments, want := range map[kernel.MomentType]float64{
		kernel.MomentsFP32: 30, kernel.MomentsBF16: 22, kernel.MomentsInt8: 18,
	} {
		f := kernel.Format{State: kernel.Split, Moments: moments, Parameter: dtype.BF16, Gradient: dtype.BF16}
		got := HostBytes(f, float64(f.TrafficBytes(parameters))/parameters)
		if math.Abs(got-want) > 0.05 { // moments of one byte have headers
			t.Errorf("%v: %g bytes a parameter, want %g", f, got, want)
		}
	}
}

// TestHiddenFrom compares with the same question asked the other way round: at that many tokens, nothing is exposed,
// and with fewer something is.
func TestHiddenFrom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := Rates{HostBytes: 30, Bandwidth: rapid.Float64Range(1e10, 1e12).Draw(t, "bandwidth"),
			FLOPS: rapid.Float64Range(1e13, 1e15).Draw(t, "flops"), Parameters: 1e9, Active: 5e8,
			Hosts: rapid.IntRange(1, 64).Draw(t, "hosts"), Backward: rapid.Float64Range(1, 3).Draw(t, "backward")}
		mode := rapid.SampledFrom([]Mode{Forward, Backward, Async}).Draw(t, "mode")
		at := func(tokens float64) Step {
			forward := 2 * float64(r.Active) * tokens / r.FLOPS
			update := r.HostBytes * float64(r.Parameters) / r.Bandwidth / float64(r.Hosts)
			return Step{Mode: mode, Layers: equal(1024), Forward: seconds(forward),
				Backward: seconds(r.Backward * forward), Update: seconds(update)}
		}
		from := r.HiddenFrom(mode)
		layer := at(from).Update/512 + 1000
		if exposed := at(from).Exposed(); exposed > layer {
			t.Errorf("%+v: %v at %g tokens", r, exposed, from)
		}
		if exposed := at(0.9 * from).Exposed(); exposed < at(from).Update/100-layer {
			t.Errorf("%+v: %v at %g tokens", r, exposed, 0.9*from)
		}
	})
	r := Rates{HostBytes: 30, Bandwidth: 1, FLOPS: 1, Parameters: 1, Active: 1, Hosts: 1}
	if tokens := r.HiddenFrom(None); tokens != 0 {
		t.Errorf("mode none hides from %g tokens on", tokens)
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * 1e9) }
