//go:build linux

package engine

import (
	"bytes"
	"strings"
	"testing"

	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/tier"
	"plimsoll/internal/state/tier/tiertest"
)

// TestKeptChunksHavePlacesOfTheirOwn, are spread over the order of a step, and lie on all disks alike.
func TestKeptChunksHavePlacesOfTheirOwn(t *testing.T) {
	c := crashCases()[0]
	for files := 1; files <= 4; files++ {
		config := c.onTier(t, tiertest.New(), 1, []string{"/a", "/b", "/c", "/d"}[:files]...)
		for kept := range config.Chunks + 1 {
			config.Tier.Kept = kept
			places, each, first := map[int]int{}, make([]int, files), 0
			for unit := range config.Chunks {
				place, ok := config.keptPlace(unit)
				if !ok {
					continue
				}
				if other, taken := places[place]; taken || place < 0 || place >= kept {
					t.Fatalf("%d files, %d kept: chunk %d has place %d, as chunk %d", files, kept, unit, place, other)
				}
				places[place] = unit
				each[unit%files]++
				if unit < config.Chunks/2 {
					first++
				}
			}
			if len(places) <= kept-files || kept == config.Chunks && len(places) != kept {
				t.Errorf("%d files, %d kept: only %d chunks have places", files, kept, len(places))
			}
			if 2*first < len(places)-2*files || 2*first > len(places)+2*files {
				t.Errorf("%d files: %d of %d chunks that are kept are in the first half", files, first, len(places))
			}
			for file, count := range each {
				if count < each[0]-1 || count > each[0] {
					t.Errorf("%d files, %d kept: file %d has %d of them, and file 0 %d", files, kept, file, count,
						each[0])
				}
			}
		}
	}
}

// TestKeptChunksAreNotRead by a step: it reads what the plan says, and writes all chunks.
func TestKeptChunksAreNotRead(t *testing.T) {
	c := crashCases()[0]
	for _, c.kept = range []int{0, 3, 1 << 20} {
		s := openOnTier(t, c.onTier(t, tiertest.New(), 2, "/a", "/b"))
		weigh(s)
		for range 2 {
			if err := stepOn(s); err != nil {
				t.Fatal(err)
			}
		}
		read, written := s.TierTraffic()
		if err := stepOn(s); err != nil {
			t.Fatal(err)
		}
		reads, writes := s.TierTraffic()
		b := s.config.TierBytes()
		if reads-read != int64(b.StepReads) || writes-written != int64(b.StepWrites) {
			t.Errorf("%d kept: a step reads %d and writes %d bytes, and %d and %d are planned", s.config.Tier.Kept,
				reads-read, writes-written, b.StepReads, b.StepWrites)
		}
		if (s.config.Tier.Kept == s.config.Chunks) != (b.StepReads == 0) {
			t.Errorf("%d of %d chunks are kept, and a step reads %d", s.config.Tier.Kept, s.config.Chunks, b.StepReads)
		}
	}
}

// TestReadsBesideAPassAreOfTheFiles: the pass may be changing what is kept.
func TestReadsBesideAPassAreOfTheFiles(t *testing.T) {
	c := crashCases()[0]
	c.kept = 1 << 20
	s := openOnTier(t, c.onTier(t, tiertest.New(), 2, "/a"))
	for unit := range s.config.Chunks {
		if s.tier.keptOf(s.tier.spare.lane, unit) != nil || s.tier.keptOf(&lane{}, unit) == nil {
			t.Errorf("chunk %d: expected the memory for a pass, and the files beside it", unit)
		}
	}
}

// TestFlipsOfKeptChunksAreMended: the files have what is kept, so a bit that flips there is found before it is used, is
// told, and changes nothing.
func TestFlipsOfKeptChunksAreMended(t *testing.T) {
	c := crashCases()[0]
	want := c.statesOf(t, 4)
	c.kept = 5
	config := c.onTier(t, tiertest.New(), 2, "/a")
	var told []string
	config.Tier.Mended = func(what string) { told = append(told, what) }
	s := openOnTier(t, config)
	weigh(s)
	for step := range 4 {
		if step == 2 {
			for i := range s.tier.kept {
				s.tier.kept[i].memory[11*i] ^= 1 << i
			}
		}
		if err := stepOn(s); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(stateOf(t, s), want[4]) {
		t.Error("the state is another than without the flips")
	}
	if len(told) != 5 || !strings.Contains(told[0], "had changed in memory since step 2") {
		t.Errorf("told: %q", told)
	}
}

// TestAnotherWindowFindsTheSameFiles: which chunks are kept may change with the memory that a process has.
func TestAnotherWindowFindsTheSameFiles(t *testing.T) {
	c := crashCases()[0]
	want := c.statesOf(t, 6)
	disk := tiertest.New()
	for step, kept := range []int{4, 0, 7, 1 << 20, 2} {
		c.kept = kept
		if seen, err := c.run(t, disk, int64(step)+1); err != nil || seen != int64(step)+1 {
			t.Fatalf("%d kept: step %d, %v", kept, seen, err)
		}
		if found := c.isWhole(t, disk, want, "another window"); found != int64(step)+1 {
			t.Errorf("the files hold step %d", found)
		}
	}
}

// TestAKilledProcessLeavesWhatIsKept: the next process finishes the step with the bits of the memory that is left, and
// reads nothing again that is there.
func TestAKilledProcessLeavesWhatIsKept(t *testing.T) {
	c := crashCases()[0].small()
	want := c.statesOf(t, 4)
	c.kept = 1 << 20
	for store := 0; ; store++ {
		disk := tiertest.New()
		s := openOnTier(t, c.onTier(t, disk, 1, "/a")) // one lane: nothing else runs at a store
		weigh(s)
		if err := s.Commit(); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := stepOn(s); err != nil {
				t.Fatal(err)
			}
		}
		setGradientsOf(s, 3)
		if _, stopped := stopAt(s, disk, store, func() {
			if err := beginNext(s); err != nil {
				t.Fatal(err)
			}
			s.Wait()
		}); !stopped {
			t.Logf("killed before each of %d stores", store)
			return
		}
		next := attachOther(t, s, 1, kernel.Generic)
		next.Finish()
		for next.Steps() < 4 {
			if err := stepOn(next); err != nil {
				t.Fatalf("killed before store %d: %v", store, err)
			}
		}
		if read, _ := next.TierTraffic(); read != 0 || !bytes.Equal(stateOf(t, next), want[4]) {
			t.Fatalf("killed before store %d: %d bytes were read, or the state is another", store, read)
		}
		next.Close()
		s.Close()
	}
}

// TestFirstWindow leaves half of a small memory to other parts, and what is enough of a large one.
func TestFirstWindow(t *testing.T) {
	config := crashCases()[0].onTier(t, tier.HostDisk{}, 1, "/a")
	one := config.LeastWindow()
	if got := config.FirstWindow(one); got.Lanes != 1 {
		t.Errorf("%+v where there is room for one lane", got)
	}
	if got := config.FirstWindow(one - 1); got.Lanes != 0 {
		t.Errorf("%+v where there is no room", got)
	}
	if got := config.FirstWindow(8 * one); config.WindowBytes(got) > 4*one {
		t.Errorf("%+v takes more than half of a small memory", got)
	}
	if got := config.FirstWindow(otherParts + 8*one); got.Lanes < 8 {
		t.Errorf("%+v leaves more than enough of a large memory", got)
	}
}
