package tier_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/tier"
	"plimsoll/internal/state/tier/tiertest"
)

// planOf returns the plan of files with chunks of one block a part.
func planOf(chunks int, folders ...string) tier.Plan {
	return tier.Plan{Folders: folders, Name: "rank0", Label: []byte("a label"), Chunks: chunks, Sections: 1,
		Sums: chunks, Sizes: func(int) [tier.Parts]int64 { return [tier.Parts]int64{tier.Block, tier.Block} }}
}

func memoryOf(p tier.Plan) tier.Memory {
	return tier.Memory{Entries: make([]atomic.Uint64, p.EntryCount()), Area: aligned(p.AreaBytes())}
}

func aligned(size int64) []byte {
	memory := make([]byte, size+tier.Block)
	return memory[-uintptr(unsafe.Pointer(&memory[0]))%tier.Block:][:size:size]
}

func anyLabel([]byte) error { return nil }

// content fills a buffer with what a part of a chunk holds after a step.
func content(p []byte, chunk int, part tier.Part, step int64) {
	random := rand.New(rand.NewPCG(uint64(chunk)<<8|uint64(part), uint64(step)))
	for i := 0; i < len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], random.Uint64())
	}
}

// writeStep writes and commits a step.
func writeStep(t *testing.T, s *tier.Store, step int64) {
	t.Helper()
	block := aligned(tier.Block)
	for chunk := range s.Plan().Chunks {
		for part := range tier.Part(tier.Parts) {
			content(block, chunk, part, step)
			if err := s.Write(chunk, part, block); err != nil {
				t.Fatal(err)
			}
		}
	}
	sums := make([]atomic.Uint64, s.Plan().Sums)
	for i := range sums {
		sums[i].Store(uint64(i) * uint64(step))
	}
	if err := s.Commit(step, func(int) int64 { return step }, sums); err != nil {
		t.Fatal(err)
	}
}

// checkStep compares everything with a step.
func checkStep(t *testing.T, s *tier.Store, step int64) {
	t.Helper()
	if found, ok := s.Committed(); !ok || found != step {
		t.Fatalf("step %d (%v) is committed, want %d", found, ok, step)
	}
	s.Adopt()
	got, want := aligned(tier.Block), make([]byte, tier.Block)
	for chunk := range s.Plan().Chunks {
		for part := range tier.Part(tier.Parts) {
			content(want, chunk, part, step)
			if err := s.Read(chunk, part, got); err != nil {
				t.Fatal(err)
			} else if string(got) != string(want) {
				t.Fatalf("the %v of chunk %d are not those of step %d", part, chunk, step)
			}
		}
	}
	s.EachOwn(func(_ int, number int64) {
		if number != step {
			t.Errorf("a section has had %d steps, want %d", number, step)
		}
	})
	s.EachSum(func(number int, sum uint64) {
		if sum != uint64(number)*uint64(step) {
			t.Errorf("sum %d is %d", number, sum)
		}
	})
}

// TestATornIndexIsNoCommit: where the power goes off while the index of a step is written, all sectors of all copies
// may be the old ones or the new ones. Only a copy that is whole counts.
func TestATornIndexIsNoCommit(t *testing.T) {
	plan := planOf(300, "/a")
	whole, before := 0, 0
	for seed := range uint64(60) {
		disk := tiertest.New()
		s, err := tier.Create(disk, plan, memoryOf(plan))
		if err != nil {
			t.Fatal(err)
		}
		for step := range int64(3) {
			writeStep(t, s, step+1)
		}
		// The next step commits, but the last call, which brings the index to the disk, finds the power off.
		calls := disk.Calls()
		disk.At, disk.Fault = calls+2*plan.Chunks+3, tiertest.PowerOff
		block := aligned(tier.Block)
		for chunk := range plan.Chunks {
			for part := range tier.Part(tier.Parts) {
				content(block, chunk, part, 4)
				if err := s.Write(chunk, part, block); err != nil {
					t.Fatal(err)
				}
			}
		}
		sums := make([]atomic.Uint64, plan.Sums)
		for i := range sums {
			sums[i].Store(uint64(i) * 4)
		}
		if err := s.Commit(4, func(int) int64 { return 4 }, sums); !errors.Is(err, tiertest.ErrPower) {
			t.Fatalf("the power is off, and the error is %v", err)
		}
		after := disk.Reboot(rand.New(rand.NewPCG(seed, 1)))
		if s, err = tier.Open(after, plan, memoryOf(plan), anyLabel); err != nil {
			t.Fatal(err)
		}
		found, _ := s.Committed()
		checkStep(t, s, found)
		switch found {
		case 4:
			whole++
		case 3:
			before++
		default:
			t.Fatalf("the files hold step %d", found)
		}
	}
	t.Logf("%d indexes were whole, %d were not", whole, before)
	if before < 30 {
		t.Error("that proves little")
	}
}

// TestRoomIsCheckedFirst, for all files of one file system together.
func TestRoomIsCheckedFirst(t *testing.T) {
	disk, plan := tiertest.New(), planOf(100, "/a", "/b")
	var needed ledger.Bytes
	for _, size := range plan.Bytes() {
		needed += size
	}
	if disk.Free = 2*needed - 1; tier.CheckRoom(disk, plan) != nil {
		t.Error("files that fit are refused")
	}
	err := tier.CheckRoom(disk, plan, plan)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("takes %v on the file system of /a", 2*needed)) {
		t.Errorf("files that do not fit: %v", err)
	}
	if disk.Free++; tier.CheckRoom(disk, plan, plan) != nil {
		t.Error("files that just fit are refused")
	}
	disk.Free = needed / 2
	if _, err := tier.Create(disk, plan, memoryOf(plan)); err == nil {
		t.Error("files were made that do not fit")
	}
	if left := disk.Paths(); len(left) > 0 {
		t.Errorf("a creation that failed has left %v", left)
	}
}

// TestRemovedFilesAreGone: what is left after a removal, broken off anywhere, is a tier as it was, or none.
func TestRemovedFilesAreGone(t *testing.T) {
	plan := planOf(3, "/a", "/b")
	for call := 0; ; call++ {
		disk := tiertest.New()
		s, err := tier.Create(disk, plan, memoryOf(plan))
		if err != nil {
			t.Fatal(err)
		}
		writeStep(t, s, 1)
		disk.At, disk.Fault = disk.Calls()+call, tiertest.PowerOff
		err = tier.Remove(disk, plan)
		after := disk.Reboot(rand.New(rand.NewPCG(uint64(call), 0)))
		if exists, failed := tier.Exists(after, plan); failed != nil {
			t.Fatal(failed)
		} else if exists {
			s, err := tier.Open(after, plan, memoryOf(plan), anyLabel)
			if err != nil {
				t.Fatalf("call %d: %v", call, err)
			}
			checkStep(t, s, 1)
		} else if _, err := tier.Create(after, plan, memoryOf(plan)); err != nil {
			t.Fatalf("call %d: making it anew: %v", call, err)
		}
		if err == nil {
			if len(disk.Paths()) > 0 {
				t.Errorf("%v are left", disk.Paths())
			}
			return
		}
	}
}

// TestMissingFoldersAreRefused by name.
func TestMissingFoldersAreRefused(t *testing.T) {
	folder := t.TempDir()
	for want, list := range map[string][]string{
		"--tier has an empty path": {folder, ""},
		"does not exist":           {folder + "/none"},
	} {
		if _, err := tier.Folders(list); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error is %v, want %q", err, want)
		}
	}
	if folders, err := tier.Folders([]string{folder}); err != nil || len(folders) != 1 || folders[0] != folder {
		t.Errorf("%v, %v", folders, err)
	}
}

// FuzzOpen opens an index file of any content. It is refused, or it is the one that was written.
func FuzzOpen(f *testing.F) {
	plan := planOf(2, "/a")
	f.Add(uint32(0), []byte{1})
	f.Add(uint32(tier.Block), []byte("another label"))
	f.Add(uint32(2*tier.Block+40), []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f})
	f.Fuzz(func(t *testing.T, offset uint32, bytes []byte) {
		disk := tiertest.New()
		s, err := tier.Create(disk, plan, memoryOf(plan))
		if err != nil {
			t.Fatal(err)
		}
		writeStep(t, s, 1)
		writeStep(t, s, 2)
		for i, b := range bytes {
			for bit := range int64(8) {
				at := (int64(offset) + int64(i)) % disk.Size("/a/rank0.index")
				if b>>bit&1 != 0 {
					disk.Flip("/a/rank0.index", 8*at+bit)
				}
			}
		}
		s, err = tier.Open(disk, plan, memoryOf(plan), anyLabel)
		if err != nil {
			return
		}
		if step, ok := s.Committed(); ok {
			if step == 1 && !s.IsTorn() {
				t.Error("the index of the last step is damaged, and that is not said")
			}
			checkStep(t, s, step)
		} else if !s.IsTorn() {
			t.Error("both indexes are damaged, and that is not said")
		}
	})
}
