//go:build linux

package rehearse

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/overlap"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
	"plimsoll/internal/state/synthetic"
)

// stacked returns a model of an embedding, equal blocks and a head. The head is tied to the embedding if that is so.
func stacked(embedding, blocks, block int64, tied bool) *model.Model {
	m := &model.Model{Name: "stacked", Architecture: "Test"}
	add := func(name string, block int, elements int64) *model.Parameter {
		m.Parameters = append(m.Parameters, model.Parameter{Name: name, Shape: []int64{elements / 64, 64},
			DType: dtype.BF16, Block: block})
		return &m.Parameters[len(m.Parameters)-1]
	}
	if embedding > 0 {
		add("embed_tokens.weight", -1, embedding)
	}
	for i := range int(blocks) {
		add(fmt.Sprintf("layers.%d.up.weight", i), i, block/2)
		add(fmt.Sprintf("layers.%d.down.weight", i), i, block/2)
	}
	add("norm.weight", -1, 64)
	if embedding > 0 {
		head := add("lm_head.weight", -1, embedding)
		if tied {
			head.TiedTo = "embed_tokens.weight"
		}
	}
	return m
}

// TestLayersAreTheModel: the layers of all ranks are all parameters, each once, and their shares are full.
func TestLayersAreTheModel(t *testing.T) {
	gpt2, err := model.Load("gpt2")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []*model.Model{gpt2, mixed(), small(1003), stacked(6400, 3, 1280, true),
		stacked(6400, 3, 1280, false), stacked(0, 5, 1280, false)} {
		for _, count := range []int{0, 1, 7} {
			for _, ranks := range []int{1, 3} {
				j := resolve(t, Request{Ranks: ranks})
				j.Model = m
				parts, err := shard.ZeRO(m.Elements(), ranks)
				if err != nil {
					t.Fatal(err)
				}
				for _, part := range parts {
					checkLayers(t, j.pacedLayers(j.layers(count), part), part)
				}
			}
		}
	}
}

func checkLayers(t *testing.T, layers []pacedLayer, part shard.Partition) {
	t.Helper()
	var held []shard.Range
	update := 0.0
	for i, l := range layers {
		held = append(held, l.ranges...)
		update += l.Update
		if l.Needed < 0 || l.Needed > 1 || l.Final != 1-l.Needed || i > 0 && l.Needed < layers[i-1].Needed {
			t.Errorf("layer %d: %+v", i, l)
		}
	}
	slices.SortFunc(held, func(a, b shard.Range) int { return int(a.First - b.First) })
	next := int64(0)
	for _, r := range held {
		if r.First != next {
			t.Fatalf("elements %d to %d are in no layer, or in two", next, r.First)
		}
		next = r.End()
	}
	if next != part.Held() || math.Abs(update-1) > 1e-9 {
		t.Errorf("the layers have %d of %d elements and %g of the update", next, part.Held(), update)
	}
}

// TestLayersOfModels looks at where layers stand in the passes.
func TestLayersOfModels(t *testing.T) {
	for _, test := range []struct {
		model *model.Model
		count int
		want  string // name, share of the update, share of the forward pass before it
	}{
		{stacked(6400, 2, 1600, true), 0, "embedding 0.67 0.00, block 0 0.16 0.00, block 1 0.16 0.16, head 0.01 0.32"},
		{stacked(6400, 2, 1600, false), 0, "embedding 0.40 0.00, block 0 0.10 0.00, block 1 0.10 0.16, head 0.41 0.32"},
		{stacked(6400, 2, 1600, true), 2, "embedding 0.67 0.00, layer 0 0.16 0.00, layer 1 0.16 0.50"},
		{small(4096), 2, "layer 0 0.50 0.00, layer 1 0.50 0.50"},
	} {
		j := resolve(t, Request{Ranks: 1})
		j.Model = test.model
		var got []string
		for _, l := range j.pacedLayers(j.layers(test.count), shard.Partition{Range: shard.Range{
			Count: test.model.Elements()}}) {
			got = append(got, fmt.Sprintf("%s %.2f %.2f", l.Name, l.Update, l.Needed))
		}
		if got := strings.Join(got, ", "); got != test.want {
			t.Errorf("got  %s\nwant %s", got, test.want)
		}
	}
}

// TestPaceRequests lists trainers that are refused.
func TestPaceRequests(t *testing.T) {
	forward := PaceRequest{Mode: "forward", ForwardMilliseconds: 10}
	with := func(change func(*PaceRequest)) PaceRequest {
		r := forward
		change(&r)
		return r
	}
	for _, test := range []struct {
		want    string
		request Request
	}{
		{"but no overlap", Request{Pace: PaceRequest{ForwardMilliseconds: 10}}},
		{"but no overlap", Request{Pace: PaceRequest{Tokens: 4096}}},
		{`--overlap is "sideways"`, Request{Pace: with(func(r *PaceRequest) { r.Mode = "sideways" })}},
		{"needs the time of a forward pass", Request{Pace: with(func(r *PaceRequest) { r.ForwardMilliseconds = 0 })}},
		{"--forward-ms is -1", Request{Pace: with(func(r *PaceRequest) { r.ForwardMilliseconds = -1 })}},
		{"--forward-ms is NaN", Request{Pace: with(func(r *PaceRequest) { r.ForwardMilliseconds = math.NaN() })}},
		{"--backward-ms is 1e+09", Request{Pace: with(func(r *PaceRequest) { r.BackwardMilliseconds = 1e9 })}},
		{"--layers is 5000", Request{Pace: with(func(r *PaceRequest) { r.Layers = 5000 })}},
		{"--tokens is -1", Request{Pace: with(func(r *PaceRequest) { r.Tokens = -1 })}},
		{"--topk-ratio is 1:", Request{Pace: with(func(r *PaceRequest) {
			r.Mode, r.TopKRatio = "zenflow", pointer(1.0)
		})}},
		{"--update-interval is 0:", Request{Pace: with(func(r *PaceRequest) {
			r.Mode, r.UpdateInterval = "zenflow", pointer(0)
		})}},
		{"are ZenFlow's, but --overlap is forward", Request{Pace: with(func(r *PaceRequest) {
			r.UpdateInterval = pointer(4)
		})}},
		{"gradients are fp16", Request{Precision: "fp16", Pace: forward}},
		{"the norm is limited to 0.5", Request{Clip: pointer(0.5), Moments: "int8", Pace: with(func(r *PaceRequest) {
			r.Mode = "backward"
		})}},
		{"moments are int8", Request{Moments: "int8", Pace: with(func(r *PaceRequest) {
			r.Mode, r.ClippedPercent = "backward", 10
		})}},
		{"--clipped-percent is 10, but --clip is 0", Request{Clip: pointer(0.0), Pace: with(func(r *PaceRequest) {
			r.Mode, r.ClippedPercent = "backward", 10
		})}},
		{"--clipped-percent is 101:", Request{Pace: with(func(r *PaceRequest) { r.ClippedPercent = 101 })}},
		{"--clipped-percent is NaN:", Request{Pace: with(func(r *PaceRequest) { r.ClippedPercent = math.NaN() })}},
		{"but --overlap is forward", Request{Pace: with(func(r *PaceRequest) { r.ClippedPercent = 10 })}},
	} {
		test.request.Model, test.request.Ranks = "gpt2", 1
		if _, err := test.request.Resolve(); !errors.As(err, new(*fault.Input)) ||
			!strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: got %v, want %s", test.request.Pace, err, test.want)
		}
	}
	backward := PaceRequest{Mode: "backward", ForwardMilliseconds: 10}
	j := resolve(t, Request{Ranks: 1, Pace: backward})
	if j.Clip != 1 || len(j.Notes) != 0 || j.Pace.Backward != 20*time.Millisecond || !j.Pace.Speculates {
		t.Errorf("%+v with clip %g, notes %q", j.Pace, j.Clip, j.Notes)
	}
	j = resolve(t, Request{Ranks: 1, Moments: "bf16", Pace: backward})
	if j.Clip != 0 || len(j.Notes) != 1 || j.Pace.Speculates {
		t.Errorf("bf16 moments: %+v with clip %g, notes %q", j.Pace, j.Clip, j.Notes)
	}
}

// paced rehearses a model with a trainer.
func paced(t *testing.T, m *model.Model, request Request) (*Placement, *Measurement) {
	t.Helper()
	j := resolve(t, request)
	j.Model = m
	p, err := NewPlacement(j, hostWith(t, 4*ledger.GiB))
	if err != nil {
		t.Fatal(err)
	}
	measured, err := p.Run(context.Background(), silent{})
	if err != nil {
		t.Fatal(err)
	}
	return p, measured
}

// TestPacedSteps runs every mode, with several ranks and formats. The memory is as planned, and the timeline is that of
// a step.
func TestPacedSteps(t *testing.T) {
	odd := stacked(1<<20, 3, 1<<20, true)
	odd.Parameters = append(odd.Parameters, small(333_333).Parameters...) // of which two ranks hold padding
	for _, mode := range overlap.Modes() {
		for _, request := range []Request{
			{Ranks: 1, Steps: 2}, {Ranks: 2, Steps: 2, Moments: "int8", Workers: 1},
		} {
			request.Pace = PaceRequest{Mode: mode, ForwardMilliseconds: 5, BackwardMilliseconds: 8}
			p, m := paced(t, odd, request)
			if len(m.Paced) != 2 || m.Updates != 2 {
				t.Fatalf("%s: %d paced steps, %d updates", mode, len(m.Paced), m.Updates)
			}
			for _, s := range m.Paced {
				if s.ExposedSeconds < 0 || math.Abs(s.Seconds-s.ExposedSeconds-0.013) > 1e-6 || s.UpdateSeconds <= 0 {
					t.Errorf("%s: %+v", mode, s)
				}
				important := s.WorkSeconds*float64(p.Pace.UpdateInterval) - work(s)
				if request.Ranks == 1 && (important > 1e-6) != (mode == string(overlap.ZenFlow)) {
					t.Errorf("%s: %+v: important columns take %g s", mode, s, important)
				}
			}
			for _, e := range ledger.Compare(p.Planned, m.Measured) {
				if e.Component != ledger.PageTables && e.Component != ledger.Process && *e.Measured != e.Planned {
					t.Errorf("%s: %s: %v planned, %v measured", mode, e.Component, e.Planned, *e.Measured)
				}
			}
			if m.StateBytes < p.StateBytes() || m.StateBytes > p.StateBytes()+256<<10 {
				t.Errorf("%s: %v of state planned, %v measured", mode, p.StateBytes(), m.StateBytes)
			}
			checkTimeline(t, p, m.Timeline)
		}
	}
}

func checkTimeline(t *testing.T, p *Placement, line *Timeline) {
	t.Helper()
	if len(line.Tracks) != 1+p.WorkerCount() || line.Tracks[0].Name != "trainer" {
		t.Fatalf("%d tracks, the first is of %q", len(line.Tracks), line.Tracks[0].Name)
	}
	times := map[Activity]time.Duration{}
	updates := 0
	for _, track := range line.Tracks {
		last := time.Duration(0)
		for _, s := range track.Spans {
			if s.From < last || s.To < s.From {
				t.Fatalf("%s: %+v begins before %v", track.Name, s, last)
			}
			last = s.To
			times[s.Activity] += s.To - s.From
			if s.Activity == Updating {
				updates++
			}
		}
	}
	chunks := 0
	for _, s := range p.Shards {
		chunks += s.Chunks
	}
	for _, s := range p.Important {
		chunks += p.Pace.UpdateInterval * s.Chunks
	}
	steps := time.Duration(p.Pace.UpdateInterval)
	if times[InForward] != steps*p.Pace.Forward || times[InBackward] != steps*p.Pace.Backward || updates != chunks {
		t.Errorf("%v forward, %v backward, %d of %d chunks", times[InForward], times[InBackward], updates, chunks)
	}
	if line.Length() < steps*(p.Pace.Forward+p.Pace.Backward) {
		t.Errorf("the step ends at %v", line.Length())
	}
}

// TestOverlapChangesNoBit: after steps with a trainer the state is the same in every mode.
func TestOverlapChangesNoBit(t *testing.T) {
	state := func(mode overlap.Mode, clip float64) [sha256.Size]byte {
		pace := PaceRequest{Mode: string(mode), ForwardMilliseconds: 2}
		if mode == overlap.Backward && clip > 0 {
			pace.ClippedPercent = 67 // of three steps, two are retracted and made again
		}
		j := resolve(t, Request{Ranks: 2, Steps: 1, Clip: &clip, Pace: pace})
		j.Model = stacked(1<<18, 3, 1<<18, true)
		p, err := NewPlacement(j, hostWith(t, ledger.GiB))
		if err != nil {
			t.Fatal(err)
		}
		training, err := p.begin()
		defer func() {
			if err := training.close(); err != nil {
				t.Error(err)
			}
		}()
		if err != nil {
			t.Fatal(err)
		}
		training.each(func(s *engine.Shard, first int64, c kernel.Chunk) {
			synthetic.Weights(s.Config().Rank, first, c)
		})
		for i := range 3 {
			if _, err := training.step(i); err != nil {
				t.Fatal(err)
			}
			if _, err := training.paced.run(); err != nil {
				t.Fatal(err)
			}
		}
		sum := sha256.New()
		for _, s := range training.shards {
			for _, component := range []ledger.Component{ledger.Parameters, ledger.MasterWeightsLow, ledger.ExpAvg,
				ledger.ExpAvgSq} {
				sum.Write(s.Arena(component).Bytes())
			}
		}
		return [sha256.Size]byte(sum.Sum(nil))
	}
	for clip, modes := range map[float64][]overlap.Mode{
		0:   {overlap.Forward, overlap.Backward, overlap.Async},
		0.5: {overlap.Forward, overlap.Backward, overlap.Async, overlap.ZenFlow},
	} {
		want := state(overlap.None, clip)
		for _, mode := range modes {
			if state(mode, clip) != want {
				t.Errorf("%s, clipped to %g: the state is another than without overlap", mode, clip)
			}
		}
	}
	if state(overlap.None, 0) == state(overlap.None, 0.5) {
		t.Error("clipping changes nothing: the test shows nothing")
	}
}

// sweep asks for the full sweep, and for its figures on the standard output.
var sweep = flag.Bool("sweep", false, "print what a trainer waits for in every mode, from T*/4 to 4 T*")

// TestSweep holds the law against paced steps: from a quarter of the passes that hide an update to four times as much.
func TestSweep(t *testing.T) {
	if testing.Short() {
		t.Skip("takes half a minute")
	}
	elements, steps, workers, factors, attempts := int64(32<<20), 3, 1, []float64{0.5, 1.5}, 20
	if *sweep {
		elements, steps, workers, factors, attempts = 96<<20, 9, 0, []float64{0.25, 0.5, 0.75, 1, 1.5, 2, 4}, 1
		fmt.Printf("%-23s %8s %12s %12s %12s %12s %12s\n", "overlap", "T / T*", "forward", "update", "exposed",
			"predicted", "difference")
	}
	m := stacked(0, 64, elements/64, false)
	for _, way := range []struct {
		mode          overlap.Mode
		clip, percent float64
	}{{overlap.Forward, 1, 0}, {overlap.Backward, 0, 0}, {overlap.Backward, 1, 0}, {overlap.Backward, 1, 100},
		{overlap.Async, 1, 0}} {
		request := Request{Ranks: 1, Steps: steps, Workers: workers, Clip: &way.clip,
			Pace: PaceRequest{Mode: string(way.mode), ForwardMilliseconds: 1, ClippedPercent: way.percent}}
		_, first := paced(t, m, request)
		update := work(leastDisturbed(first.Paced))
		for _, factor := range factors {
			ok, found := false, []string{}
			for len(found) < attempts && !ok { // a host that is busy with other work needs several
				request.Pace.ForwardMilliseconds = 1000 * factor * update / forwards(request.Pace)
				_, measured := paced(t, m, request)
				took := work(leastDisturbed(measured.Paced))
				if way.mode != overlap.Backward || way.clip == 0 {
					took = min(update, took)
				} // else the longer the pass, the more of the step speculates, and takes as long as that does
				update = took
				ok = followsLaw(request.Pace, factor, measured.Paced)
				found = append(found, figures(request, factor, measured.Paced))
			}
			if *sweep {
				fmt.Println(found[0])
			} else if !ok {
				t.Errorf("the law is off in %d attempts:\n%s", len(found), strings.Join(found, "\n"))
			}
		}
	}
}

// forwards returns how many times the forward pass the time is that hides an update, or what a clipped step takes from
// the verdict on.
func forwards(pace PaceRequest) float64 {
	if pace.Mode == string(overlap.Forward) || pace.ClippedPercent > 0 {
		return 1
	}
	return 1 + backwardForwards
}

// followsLaw reports whether the trainer waits as long as the law predicts, and for nothing where it need not. Other
// work on the host only adds to a wait, so one step in which the law holds is enough.
func followsLaw(pace PaceRequest, factor float64, steps []PacedStep) bool {
	window := forwards(pace) * pace.ForwardMilliseconds / 1000
	return slices.ContainsFunc(steps[1:], func(s PacedStep) bool {
		switch predicted := s.PredictedSeconds / s.Seconds; {
		case math.Abs(s.ExposedSeconds-s.PredictedSeconds)/s.Seconds > 0.1:
			return false
		case factor < 1:
			return predicted > 0.08 // else it is no test
		}
		return work(s) <= window && s.ExposedSeconds/s.Seconds < 0.05
	})
}

// figures describes the step that other work has disturbed least.
func figures(request Request, factor float64, steps []PacedStep) string {
	pace, clips := request.Pace, ""
	if pace.Mode == string(overlap.Backward) && *request.Clip > 0 {
		clips = fmt.Sprintf(", %g %% clipped", pace.ClippedPercent)
	}
	s := leastDisturbed(steps)
	exposed, predicted := 100*s.ExposedSeconds/s.Seconds, 100*s.PredictedSeconds/s.Seconds
	return fmt.Sprintf("%-23s %8.2f %9.1f ms %9.1f ms %10.1f %% %10.1f %% %+5.1f points", pace.Mode+clips, factor,
		pace.ForwardMilliseconds, 1000*s.UpdateSeconds, exposed, predicted, exposed-predicted)
}

func work(s PacedStep) float64 { return s.UpdateSeconds + s.NormSeconds }

// leastDisturbed returns the step whose workers were through first, without the first step.
func leastDisturbed(steps []PacedStep) PacedStep {
	return slices.MinFunc(steps[1:], func(a, b PacedStep) int { return cmp.Compare(work(a), work(b)) })
}
