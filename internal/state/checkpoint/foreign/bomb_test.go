//go:build linux

package foreign

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/pickle"
)

// taken returns the memory that a function allocates, freed memory included.
func taken(f func()) int64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc - before.TotalAlloc)
}

// TestArchiveHoldsNoMoreThanTheFile tries small archives that claim to hold much.
func TestArchiveHoldsNoMoreThanTheFile(t *testing.T) {
	archive := func(method uint16, count int, content []byte) []byte {
		return zipOf(t, slices.Repeat([]zipEntry{{"archive/data.pkl", method, content}}, count)...)
	}
	pickle := append([]byte("\x80\x02"), append(bytes.Repeat([]byte("]"), 8<<20), '.')...)
	shared := archive(zip.Store, 100, make([]byte, 100))
	// Every entry of the directory is at the place of the first, and has all bytes.
	const sizes, place = 20, 42
	for at := bytes.Index(shared, []byte("PK\x01\x02")); at >= 0 &&
		string(shared[at:at+4]) == "PK\x01\x02"; at += 46 + len("archive/data.pkl") {
		for _, field := range []int{sizes, sizes + 4} {
			binary.LittleEndian.PutUint32(shared[at+field:], 5000)
		}
		binary.LittleEndian.PutUint32(shared[at+place:], 0)
	}
	for name, test := range map[string]struct {
		file []byte
		says string
	}{
		"compressed": {archive(zip.Deflate, 1, pickle), "torch.save does not compress"},
		"shared":     {shared, "more bytes than the file"},
		"no compressed": {archive(zip.Store, 1, pickle),
			"byte 2097154 of the pickle: more than 2097152 objects are on the stack"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "file.pt")
			if err := os.WriteFile(path, test.file, 0o600); err != nil {
				t.Fatal(err)
			}
			var err error
			took := taken(func() { _, err = OpenTorch(t.Context(), path, BesideTorch{}, nil) })
			var input *fault.Input
			if !errors.As(err, &input) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("%v, want %q", err, test.says)
			}
			if most := int64(1<<20 + 40*len(test.file)); took > most {
				t.Errorf("a file of %d bytes took %d KiB, expected at most %d", len(test.file), took>>10, most>>10)
			}
		})
	}
}

// TestSharedStateIsNotWalkedForEachParameter has parameters share a large state. Walking
// all of it for each parameter would take hours.
func TestSharedStateIsNotWalkedForEachParameter(t *testing.T) {
	const count = 20_000
	members := pickle.NewDict("exp_avg", int64(0), "exp_avg_sq", int64(0))
	for i := range int64(count) {
		members.Entries = append(members.Entries, pickle.Entry{Key: i})
	}
	f := &torchFile{archive: &archive{path: "file"}}
	err := f.add("a", 0, pickle.Tensor{}, members)
	if err == nil || !strings.Contains(err.Error(), "has 20002 members, expected at most 64") {
		t.Error(err)
	}
	if got := pickle.Member(members, "exp_avg_sq"); got != int64(0) {
		t.Errorf("a member of a large dict is %v", got)
	}
	if got := pickle.Member(members, "step"); got != nil {
		t.Errorf("a member that is not there is %v", got)
	}
}
