//go:build linux

package engine

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// parameterWords returns the parameters of a shard as numbers.
func parameterWords(s *Shard) (words []uint32) {
	for unit := range s.config.Chunks {
		state := s.chunk(unit).state()
		for i := range state.Len() {
			words = append(words, state.ParameterBits(s.config.Format, i))
		}
	}
	return words
}

// changedWords returns the parameters with their numbers before the last step, by its changes.
func changedWords(s *Shard) (words []uint32) {
	words = parameterWords(s)
	s.EachChange(s.config.Range(), func(at shard.Chunk, state kernel.Chunk, changes *kernel.Changes) {
		for element, old := range changes.All(state.Parameter) {
			words[at.First+int64(element)] = uint32(old)
		}
	})
	return words
}

// TestStepsNoteChanges makes steps of shards with several sections, some of which steps leave alone, by several
// workers. Each step's changes lead from its parameters back to those before it.
func TestStepsNoteChanges(t *testing.T) {
	for i, c := range crashCases() {
		if c.format.Parameter.Size() != 2 {
			continue // notes say which parameters in fp32 changed, and not what they were
		}
		for _, sums := range []bool{false, true} {
			t.Run(fmt.Sprint(i, "/sums=", sums), func(t *testing.T) {
				s := c.newShard(t, i%2 == 0)
				if sums && s.config.Journal {
					s.config.Sums = true
				}
				fillShard(s)
				s.NoteChanges()
				for range 5 {
					before := parameterWords(s)
					if err := beginNext(s); err != nil {
						t.Fatal(err)
					}
					s.Wait()
					from, known := s.NotesChanges()
					if !known || from != s.Steps()-1 {
						t.Fatalf("after step %d the changes are known: %v, from step %d", s.Steps(), known, from)
					}
					if !slices.Equal(changedWords(s), before) {
						t.Fatalf("step %d: the changes do not lead back to the parameters before it", s.Steps())
					}
					s.ChangesAreRead()
				}
			})
		}
	}
}

// TestLostChangesAreNotKnown has no changes after two steps, a write and a step of another process, until they are
// noted anew.
func TestLostChangesAreNotKnown(t *testing.T) {
	s := crashCases()[0].newShard(t, true)
	fillShard(s)
	step := func() {
		t.Helper()
		if err := beginNext(s); err != nil {
			t.Fatal(err)
		}
		s.Wait()
	}
	know := func(want bool, when string) {
		t.Helper()
		if _, known := s.NotesChanges(); known != want {
			t.Errorf("%s the changes are known: %v, expected %v", when, known, want)
		}
	}
	step()
	know(false, "before anybody wants to know")
	s.NoteChanges()
	know(true, "without a step")
	step()
	know(true, "after a step")
	step()
	know(false, "after a second step")
	s.NoteChanges()
	step()
	know(true, "after a step that is noted anew")
	s.ChangesAreRead()
	fillShard(s)
	know(false, "after a write")
	s.NoteChanges()
	s.SetSteps(77)
	know(false, "after another step was set")
}

// BenchmarkChanges makes steps of two shards, one that notes changes and one that does not, in turns. It reports how
// much longer the median and the lowest decile of the steps with notes are, in percent, and how many in a hundred of
// the parameters change.
func BenchmarkChanges(b *testing.B) {
	for _, state := range []kernel.State{kernel.Split, kernel.FP32, kernel.Split24} {
		for _, moments := range []kernel.MomentType{kernel.MomentsFP32, kernel.MomentsBF16, kernel.MomentsInt8} {
			for _, rate := range []float64{1e-9, 1e-6, 1e-5, 1e-4} {
				f := split
				f.State, f.Moments = state, moments
				b.Run(fmt.Sprintf("%v/rate=%g", f, rate), func(b *testing.B) { benchmarkChanges(b, f, rate) })
			}
		}
	}
}

func benchmarkChanges(b *testing.B, f kernel.Format, rate float64) {
	const elements = 512 * shard.DefaultChunk
	available := kernel.Available()
	var shards [2]*Shard
	for i := range shards {
		s, err := NewShard(ShardConfig{Layout: uniform(f, elements), Kernel: available[len(available)-1],
			CPUs: cpus(b, 1), Journal: true, Sums: available[len(available)-1].SumsAreFree(f)})
		if err != nil {
			b.Fatal(err)
		}
		defer s.Close()
		s.Each(func(at shard.Chunk, k kernel.Chunk) {
			r := rand.New(rand.NewPCG(1, uint64(at.First)))
			for i := range k.Len() {
				k.PutMasterWeight(f, i, float32(r.NormFloat64()*0.02))
				k.Gradient.Put(i, float32(r.NormFloat64()*0.01))
			}
		})
		if i == 1 {
			s.NoteChanges()
		}
		shards[i] = s
	}
	adam := optim.DefaultAdamW()
	adam.LearningRate = rate
	var took [2][]float64
	for b.Loop() {
		for way, s := range shards {
			s.ChangesAreRead()
			begin := time.Now()
			if err := s.Begin(s.Steps()+1, 1, []optim.Optimizer{adam}); err != nil {
				b.Fatal(err)
			}
			s.Wait()
			took[way] = append(took[way], time.Since(begin).Seconds())
		}
	}
	for way := range took {
		slices.Sort(took[way])
	}
	changed := 0
	shards[1].EachChange(shards[1].config.Range(), func(_ shard.Chunk, _ kernel.Chunk, changes *kernel.Changes) {
		changed += changes.Count()
	})
	at := func(way, part int) float64 { return took[way][len(took[way])/part] }
	b.ReportMetric(1000*at(0, 2), "ms/step")
	b.ReportMetric(100*(at(1, 2)/at(0, 2)-1), "%-longer")
	b.ReportMetric(100*(at(1, 10)/at(0, 10)-1), "%-longer-decile")
	b.ReportMetric(100*float64(changed)/elements, "%-changed")
}
