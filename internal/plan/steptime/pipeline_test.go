package steptime

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/input/parallel"
	"plimsoll/internal/plan/job"
)

// evenTable returns a pipeline whose passes all take the same, and 1F1B or the interleaved schedule.
func evenTable(stages, chunks, micros int, message float64) *timetable {
	t := &timetable{messages: make([]float64, stages*chunks)}
	for i := range t.messages {
		t.messages[i] = message
	}
	d := parallel.Degrees{Pipeline: int64(stages), Virtual: int64(chunks)}
	for s := range stages {
		t.passes = append(t.passes, parallel.Schedule(d, int64(s), micros, stages))
		times := make([]passTimes, chunks)
		for c := range times {
			times[c] = passTimes{1, 2, 1}
		}
		t.times = append(t.times, times)
	}
	return t
}

// TestBubble: without messages a schedule takes what Narayanan et al. (arXiv 2104.04473, section 2.2) derive: a bubble
// of (p - 1) / (m v) of the time that a stage computes.
func TestBubble(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stages := rapid.IntRange(2, 6).Draw(t, "stages")
		chunks := rapid.IntRange(1, 4).Draw(t, "chunks")
		micros := stages * rapid.IntRange(1, 5).Draw(t, "groups")
		ends, err := evenTable(stages, chunks, micros, 0).ends(micros)
		if err != nil {
			t.Fatal(err)
		}
		computes := float64(3 * micros * chunks)
		want := computes * (1 + float64(stages-1)/float64(micros*chunks))
		if math.Abs(ends[0]-want) > 1e-9 {
			t.Errorf("the first stage ends at %g, want %g", ends[0], want)
		}
		later, err := evenTable(stages, chunks, micros, 0.5).ends(micros)
		if err != nil || later[0] < ends[0]+float64(stages-1) {
			t.Errorf("messages of 0.5 on the way through %d stages and back: %g instead of %g, %v", stages, later[0],
				ends[0], err)
		}
	})
}

// TestSchedulesWithoutBubbles: with halves that all take the same, stages wait less than in the interleaved schedule.
func TestSchedulesWithoutBubbles(t *testing.T) {
	const stages, micros = 4, 16
	plain, err := evenTable(stages, 2, micros, 0).ends(micros)
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string]*job.Pipeline{
		"zero bubble": {Degree: stages, Schedule: "InterleavedZeroBubble", Micros: micros},
		"ZBV":         {Degree: stages, Schedule: "ZBVZeroBubble", Micros: micros},
		"DualPipeV":   {Degree: stages, Schedule: "DualPipeV", Micros: micros},
	} {
		p.Table = parallel.NewTable(stages, make([]int64, 2*stages))
		table := evenTable(stages, 2, micros, 0)
		table.vee = p.IsV()
		for s := range table.passes {
			table.passes[s] = p.Passes(int64(s), micros)
		}
		ends, err := table.ends(micros)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		most, computes := slices.Max(ends), float64(6*micros)
		if most < computes || most >= slices.Max(plain) {
			t.Errorf("%s takes %g, interleaved 1F1B %g, and a stage computes %g", name, most, slices.Max(plain),
				computes)
		}
	}
}

// TestImbalance: a stage that takes longer than the others holds all of them up in every micro batch.
func TestImbalance(t *testing.T) {
	even := evenTable(4, 1, 16, 0)
	slow := evenTable(4, 1, 16, 0)
	slow.times[3][0] = passTimes{1.5, 3, 1.5}
	before, err := even.run(16, make([]duty, 4))
	if err != nil {
		t.Fatal(err)
	}
	after, err := slow.run(16, make([]duty, 4))
	if want := 16 * 1.5; err != nil || after.pipeline-before.pipeline != want {
		t.Errorf("%g more, want %g, %v", after.pipeline-before.pipeline, want, err)
	}
}

// TestPipelineOfJob: the stages of a job have together the work of all of it, and a step is as long as its parts.
func TestPipelineOfJob(t *testing.T) {
	q := job.Request{Model: "llama-3-8b", GPU: "H100-80GB", GPUs: 8, FSDP: "2", Precision: "bf16", Sequence: 2048,
		PipelineParallel: 4, Accumulation: 16}
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	var sum, trained float64
	cut := newStages(j, 1000)
	for _, list := range cut.chunks {
		for _, c := range list {
			if c.work.reach != 1 {
				t.Errorf("the backward pass goes through %g of a stage", c.work.reach)
			}
			sum, trained = sum+c.work.dense, trained+c.trained
		}
	}
	whole := *j
	whole.Pipeline = nil
	if want := workOf(&whole).dense; math.Abs(sum/want-1) > 1e-9 || math.Abs(trained-1000) > 1e-6 {
		t.Errorf("stages have %g operations of %g, and %g of 1000 trained parameters", sum, want, trained)
	}
	s := resolved(t, q, Machine{})
	if s.Tokens != 2*16*2048 {
		t.Errorf("%d tokens", s.Tokens)
	}
	parts := s.Forward.Expected + s.Backward.Expected + s.Communication.Expected + s.Pipeline.Expected +
		s.Optimizer.Expected
	if d := parts - s.Total.Expected; d > 1000 || d < -1000 { // nanoseconds
		t.Errorf("parts of %v and a step of %v", parts, s.Total.Expected)
	}
	more := q
	more.Accumulation = 64
	longer := resolved(t, more, Machine{})
	share := func(s *Step) float64 { return s.Pipeline.Expected.Seconds() / s.Total.Expected.Seconds() }
	if share(longer) >= share(s)/2 || share(s) < 0.08 || share(s) > 0.25 {
		t.Errorf("waits take %g of a step of 16 micro batches, and %g of 64", share(s), share(longer))
	}
}

// TestMessages: a boundary between nodes has the speed of the network.
func TestMessages(t *testing.T) {
	r := &rates{peer: 100, network: 10}
	got := r.messages(1000, 4, 1, 16, 8)
	for place, rate := range []float64{100, 10, 100, 10} {
		if want := 1000/rate + collectiveTime; math.Abs(got[place]-want) > 1e-9 {
			t.Errorf("behind chunk %d a message takes %g, want %g", place, got[place], want)
		}
	}
}
