//go:build linux

package engine

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"strings"
	"sync"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// slowCase is a case whose steps take milliseconds, in many chunks, so that something can
// happen meanwhile.
func slowCase() crashCase {
	c := crashCases()[3]
	c.chunk = 256
	return c
}

// slowShard returns a shard of slowCase with the slowest kernels.
func slowShard(t *testing.T) *Shard {
	s := slowCase().newShard(t, true)
	s.config.Kernel = kernel.Generic
	return s
}

// TestOnlyTheNextStepBegins refuses all others, and changes nothing then.
func TestOnlyTheNextStepBegins(t *testing.T) {
	s := slowShard(t)
	adam := []optim.Optimizer{optim.DefaultAdamW(), optim.DefaultAdamW()}
	for name, refused := range map[string]struct {
		step       int64
		scale      float64
		optimizers []optim.Optimizer
	}{
		"the one before":    {0, 1, adam},
		"the one after":     {2, 1, adam},
		"scale":             {1, math.Inf(1), adam},
		"too large a scale": {1, 1e39, adam},
		"too large a rate":  {1, 1, []optim.Optimizer{adam[0], optim.Adam{LearningRate: 1e39}}},
		"too few groups":    {1, 1, adam[:1]},
		"other algorithm":   {1, 1, []optim.Optimizer{optim.DefaultLion(), optim.DefaultLion()}},
		"no such optimizer": {1, 1, []optim.Optimizer{adam[0], optim.Adam{LearningRate: -1}}},
	} {
		before := bytes.Clone(s.Arena(ledger.StepJournal).Bytes())
		if s.Begin(refused.step, refused.scale, refused.optimizers) == nil {
			t.Errorf("%s: a step began", name)
		}
		if !bytes.Equal(s.Arena(ledger.StepJournal).Bytes(), before) {
			t.Errorf("%s: the journal was changed", name)
		}
	}
	if err := beginNext(s); err != nil {
		t.Fatal(err)
	}
	if err := s.Begin(2, 1, adam); err == nil || !strings.Contains(err.Error(), "step 1 is under way") {
		t.Errorf("a step began while another was under way, or the error is another: %v", err)
	}
	s.Wait()
	s.SetSteps(41)
	if err := beginNext(s); err != nil || s.Steps() != 41 {
		t.Errorf("the step after 41: %v, at %d", err, s.Steps())
	}
	s.Wait()
	if s.Steps() != 42 {
		t.Errorf("at step %d, want 42", s.Steps())
	}
}

// TestStretchesAreAwaited waits for the ranges of a shard in several goroutines. The
// parameters of a range right after the wait must be those after the step.
func TestStretchesAreAwaited(t *testing.T) {
	after := slowShard(t)
	makeSteps(t, after, 3)
	s := slowShard(t)
	makeSteps(t, s, 2)
	if err := beginNext(s); err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for g := range 3 {
		group.Go(func() {
			for first := g * 1000; first < crashElements; first += 3000 {
				count := min(1000, crashElements-first)
				s.WaitRange(shard.Between(int64(first), int64(first+count)))
				for i := first; i < first+count; i++ {
					got, at := locate(s, i)
					want, _ := locate(after, i)
					if master(got, at) != master(want, at) {
						t.Errorf("parameter %d was waited for and is not updated", i)
						return
					}
				}
			}
		})
	}
	group.Wait()
	s.Wait()
	s.WaitRange(s.config.Range()) // at once: nothing is under way
}

// TestStretchesAreDoneBeforeTheStep waits for all other ranges while a snapshot holds the
// last chunk up.
func TestStretchesAreDoneBeforeTheStep(t *testing.T) {
	s := slowShard(t)
	last := s.config.Chunk(s.config.Chunks - 1)
	release := make(chan struct{})
	x := s.Snapshot(func(at shard.Chunk, _ kernel.Chunk) error {
		if at == last {
			<-release
		}
		return nil
	})
	if err := beginNext(s); err != nil {
		t.Fatal(err)
	}
	s.WaitRange(shard.Between(0, last.First))
	if s.Steps() != 0 {
		t.Error("the step is finished, and its last chunk cannot be")
	}
	close(release)
	s.Wait()
	if s.Steps() != 1 {
		t.Error("the step is not finished")
	}
	if err := x.Run(context.Background(), nil); err != nil {
		t.Error(err)
	}
}

// TestSumsOutliveNoStep: sums of gradients that arrived count only until the next step.
func TestSumsOutliveNoStep(t *testing.T) {
	s := slowShard(t)
	want := s.SumSquares()
	s.GradientsArrived(s.config.Range())
	s.gradient.Put(5, 1000)
	if got := s.SumSquares(); got != want {
		t.Errorf("gradients that arrived are read again: %v, want %v", got, want)
	}
	s.ForgetArrived()
	want = s.SumSquares()
	s.GradientsArrived(s.config.Range())
	s.gradient.Put(5, 0)
	makeSteps(t, s, 1)
	if got := s.SumSquares(); !(got < want) {
		t.Errorf("after a step the sum is %v, that of gradients before it", got)
	}
}

// TestJournaledStepAllocatesNothing covers everything that a step of the service does.
func TestJournaledStepAllocatesNothing(t *testing.T) {
	s := crashCases()[0].newShard(t, true)
	optimizers := []optim.Optimizer{optim.DefaultAdamW()}
	allocations := testing.AllocsPerRun(50, func() {
		s.GradientsArrived(s.config.Range())
		gradScale := 1 / (1 + s.SumSquares())
		if err := s.Begin(s.Steps()+1, gradScale, optimizers); err != nil {
			t.Error(err)
		}
		s.WaitRange(shard.Range{Count: 100})
		s.Wait()
	})
	if allocations != 0 {
		t.Errorf("%v heap allocations a step", allocations)
	}
}

// TestJournalChangesNothing compares steps with a journal with steps without.
func TestJournalChangesNothing(t *testing.T) {
	for _, c := range crashCases() {
		with, without := c.newShard(t, true), c.newShard(t, false)
		makeSteps(t, with, 5)
		makeSteps(t, without, 5)
		if !bytes.Equal(imageOf(with), imageOf(without)) {
			t.Errorf("%s: the journal changes what a step does", c.name)
		}
	}
}

// TestWrongArenasAreNotAttached: the error names the fault, and no descriptor is left.
func TestWrongArenasAreNotAttached(t *testing.T) {
	c := crashCases()[0]
	s := c.newShard(t, true)
	file := func(name string) *os.File {
		for _, a := range s.Arenas() {
			if strings.HasSuffix(a.Name(), "/"+name) {
				return a.File()
			}
		}
		return nil
	}
	files := func() map[string]*os.File {
		all := map[string]*os.File{}
		for _, a := range s.Arenas() {
			all[a.Name()] = a.File()
		}
		return all
	}
	before := descriptors(t)
	for want, spoil := range map[string]func(*ShardConfig, map[string]*os.File){
		"arena rank0/exp_avg of 352 KiB: there is no file": func(_ *ShardConfig, f map[string]*os.File) {
			delete(f, "rank0/exp_avg")
		},
		"arena rank0/gradients of 176 KiB: its file has 360448 byt": func(_ *ShardConfig, f map[string]*os.File) {
			f["rank0/gradients"] = file("exp_avg")
		},
		"other sections, format or chunks": func(c *ShardConfig, _ map[string]*os.File) {
			c.Layout = layout(c.Format, 7001, c.Sections())
		},
		"there is no file of that name": func(c *ShardConfig, _ map[string]*os.File) {
			c.Rank = 1
		},
		"rank0/b/parameters of 176 KiB: there": func(c *ShardConfig, _ map[string]*os.File) {
			c.Part = "b"
		},
	} {
		config, all := s.config, files()
		spoil(&config, all)
		if other, err := AttachShard(config, all); err == nil {
			other.Close()
			t.Errorf("attached; want an error of %q", want)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("the error is %q, want %q", err, want)
		}
	}
	head := at[journalHead](s.Arena(ledger.StepJournal).Bytes(), 0)
	for want, spoil := range map[string]func(){
		"step_journal: it is no journal": func() { head.magic++ },
		fmt.Sprintf("step_journal: its version is %d, expected %d", journalVersion+1, journalVersion): func() {
			head.version++
		},
		"step_journal: 3 updates were begun and 1 fin": func() { head.begun.Store(3) },
		"step_journal: 3 accumulations of gradients w": func() { head.accumulations.begun.Store(3) },
	} {
		head.init(s.config)
		head.begun.Store(1)
		head.finished.Store(1)
		head.accumulations.begun.Store(1)
		head.accumulations.finished.Store(1)
		spoil()
		if _, err := AttachShard(s.config, files()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error is %v, want %q", err, want)
		}
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors are open, %d were", after, before)
	}
}

func descriptors(t *testing.T) int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// TestSmallShardIsUpdatedByTheCaller: BeginThen has called the function when it returns,
// and the bits are the same as a worker's.
func TestSmallShardIsUpdatedByTheCaller(t *testing.T) {
	for _, journal := range []bool{false, true} {
		format := crashCases()[3].format
		c := ShardConfig{Layout: layout(format, 4096, shard.Uniform(format, 4000)), CPUs: cpus(t, 2), Journal: journal}
		var shards [2]*Shard
		for i := range shards {
			s, err := NewShard(c)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			fillShard(s)
			shards[i] = s
		}
		adam := []optim.Optimizer{optim.DefaultAdamW()}
		for step := int64(1); step < 4; step++ {
			heard := 0
			u := Update{Step: step, GradScale: 1, Optimizers: adam}
			if err := shards[0].BeginThen(u, func() { heard++ }); err != nil {
				t.Fatal(err)
			}
			if heard != 1 || shards[0].Steps() != step {
				t.Errorf("step %d: BeginThen has returned, and told %d times of the end of step %d",
					step, heard, shards[0].Steps())
			}
			if err := shards[1].Begin(step, 1, adam); err != nil {
				t.Fatal(err)
			}
			shards[1].Wait()
		}
		for i, a := range shards[0].Arenas() {
			if b := shards[1].Arenas()[i]; !strings.HasSuffix(a.Name(), string(ledger.StepJournal)) &&
				!bytes.Equal(a.Bytes(), b.Bytes()) {
				t.Errorf("%s differs", a.Name())
			}
		}
	}
}
