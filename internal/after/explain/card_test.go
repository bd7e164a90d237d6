package explain

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
)

// explained explains the text of a log.
func explained(t *testing.T, text string) *Explanation {
	t.Helper()
	source, err := evidence.Read("log", strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return Explain(Inputs{Sources: []*evidence.Source{source}})
}

// TestOwnProcess: an error that lists its own process by a number of the host does not blame another one.
func TestOwnProcess(t *testing.T) {
	process := func(pid int, used ledger.Bytes) evidence.GPUProcess {
		return evidence.GPUProcess{PID: pid, Used: known(used)}
	}
	for name, c := range map[string]struct {
		change  func(*evidence.GPUOutOfMemory)
		detail  string
		sure    Confidence
		holders map[string]ledger.Bytes // some of them; 0 for one that must not be there
	}{
		"alone, by its number on the host": {func(f *evidence.GPUOutOfMemory) {
			f.Self, f.Others = evidence.Size{}, []evidence.GPUProcess{process(9, 79*gib)}
		}, "capacity", Certain, map[string]ledger.Bytes{"process 9": 0, "outside_pytorch": gib}},
		"beside another": {func(f *evidence.GPUOutOfMemory) {
			f.Allocated, f.Reserved = known(30*gib), known(31*gib)
			f.Self, f.Others = evidence.Size{}, []evidence.GPUProcess{process(8, 32*gib), process(9, 47*gib)}
		}, "another process", Certain, map[string]ledger.Bytes{"process 8": 0, "process 9": 47 * gib}},
		"two of one size": {func(f *evidence.GPUOutOfMemory) {
			f.Allocated, f.Reserved = known(38*gib), known(39*gib)
			f.Self, f.Others = evidence.Size{}, []evidence.GPUProcess{process(8, 39*gib), process(9, 39*gib)}
		}, "another process", Certain, map[string]ledger.Bytes{"process 8": 0, "process 9": 39 * gib}},
		"another, and its own unlisted": {func(f *evidence.GPUOutOfMemory) {
			f.Allocated, f.Reserved = known(30*gib), known(31*gib)
			f.Self, f.Others = evidence.Size{}, []evidence.GPUProcess{process(9, 47*gib)}
		}, "another process", Certain, map[string]ledger.Bytes{"process 9": 47 * gib}},
		"figures that the driver does not have": {func(f *evidence.GPUOutOfMemory) {
			f.Allocated, f.Reserved, f.Self = known(9*gib), known(10*gib), known(0)
			f.Others = []evidence.GPUProcess{process(8, 0), process(9, 0)}
		}, "another process", Likely, map[string]ledger.Bytes{"process 8": 0}},
		"nothing listed, and little of it is PyTorch's": {func(f *evidence.GPUOutOfMemory) {
			f.Allocated, f.Reserved, f.Self = known(9*gib), known(10*gib), evidence.Size{}
		}, "another process", Likely, nil},
		"nothing listed, and a context": {func(f *evidence.GPUOutOfMemory) { f.Self = evidence.Size{} },
			"capacity", Certain, nil},
		"pieces that are no share of the card": {func(f *evidence.GPUOutOfMemory) {
			f.Requested, f.Free = known(18*ledger.MiB), known(15*ledger.MiB)
			f.Allocated, f.Reserved, f.Self = known(79*gib), known(79*gib+64*ledger.MiB), known(79*gib+gib/2)
		}, "capacity", Certain, nil},
		"pieces beside a much larger neighbour": {func(f *evidence.GPUOutOfMemory) {
			f.Allocated, f.Reserved, f.Self = known(30*gib), known(33*gib), known(34*gib)
			f.Others = []evidence.GPUProcess{process(9, 45*gib)}
		}, "another process", Certain, nil},
	} {
		t.Run(name, func(t *testing.T) {
			e := Explain(Inputs{Sources: []*evidence.Source{from("log", evidence.TrainerLog, oom(c.change))}})
			if e.Cause.Resource != GPU || e.Cause.Detail != c.detail || e.Confidence != c.sure {
				t.Errorf("%+v (%s), expected %q (%s)", e.Cause, e.Confidence, c.detail, c.sure)
			}
			held := map[string]ledger.Bytes{}
			for _, h := range e.Holders {
				held[string(h.Component)] = h.Bytes
			}
			for holder, want := range c.holders {
				if held[holder] != want {
					t.Errorf("%s holds %v, expected %v", holder, held[holder], want)
				}
			}
		})
	}
}

// TestSmallPieces: pieces that would have met the request, but are no share of the card, are ruled out as such.
func TestSmallPieces(t *testing.T) {
	e := Explain(Inputs{Sources: []*evidence.Source{from("log", evidence.TrainerLog,
		oom(func(f *evidence.GPUOutOfMemory) {
			f.Requested, f.Free = known(18*ledger.MiB), known(15*ledger.MiB)
			f.Allocated, f.Reserved, f.Self = known(79*gib), known(79*gib+64*ledger.MiB), known(79*gib+gib/2)
		}))}})
	want := RuledOut{GPU, "fragmentation: only 64.0 MiB of 80.0 GiB were reserved without a tensor"}
	if !slices.Contains(e.RuledOut, want) {
		t.Errorf("%+v, expected %+v", e.RuledOut, want)
	}
}

// TestMessagesOfGPUs explains messages of public threads.
func TestMessagesOfGPUs(t *testing.T) {
	for _, line := range shared(t, "gpu-messages.jsonl") {
		var message struct{ Text, Detail string }
		if err := json.Unmarshal([]byte(line), &message); err != nil {
			t.Fatal(err)
		}
		if e := explained(t, message.Text); e.Cause.Resource != GPU || e.Cause.Detail != message.Detail {
			t.Errorf("%q, expected %q: %s", e.Cause.Detail, message.Detail, message.Text)
		}
	}
}

// shared returns the lines of a file of failures that lies beside the repository.
func shared(t *testing.T, name string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../../../shared/data/failures", name))
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skipf("the failures are not here: %v", err)
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// TestLastLinesOfKills: whatever program says that a process was killed, the answer is never that nothing failed.
func TestLastLinesOfKills(t *testing.T) {
	killed := regexp.MustCompile(`\b137\b|\b[Kk]illed\b|signal 9|SIGKILL|have died`)
	found := 0
	for _, line := range shared(t, "last-lines.jsonl") {
		var last struct{ Text string }
		if err := json.Unmarshal([]byte(line), &last); err != nil {
			t.Fatal(err)
		}
		if !killed.MatchString(last.Text) {
			continue
		}
		found++
		if e := explained(t, last.Text); e.Cause.Resource == None {
			t.Errorf("nothing failed, as explain says of %q", last.Text)
		}
	}
	if found < 10 {
		t.Errorf("%d lines say that a process was killed, expected 10 or more", found)
	}
}

// TestMetalBelowItsLimit: where the sizes of MPS leave room for the request, its limit is not the cause.
func TestMetalBelowItsLimit(t *testing.T) {
	for text, want := range map[string]struct {
		detail string
		sure   Confidence
	}{
		"(MPS allocated: 0 bytes, other allocations: 0 bytes, max allowed: 7.93 GB). Tried to allocate 256 bytes": {
			"", Likely},
		"(MPS allocated: 8.89 GB, other allocations: 172.98 MB, max allowed: 9.07 GB). Tried to allocate 6.25 MB": {
			"capacity", Certain},
		"(MPS allocated: 1.45 GB, other allocations: 7.42 GB, max allowed: 9.07 GB). Tried to allocate 563.62 MB": {
			"memory outside PyTorch", Certain},
	} {
		e := explained(t, "RuntimeError: MPS backend out of memory "+text+" on shared pool.\n")
		if e.Cause.Resource != GPU || e.Cause.Detail != want.detail || e.Confidence != want.sure {
			t.Errorf("%s is %s, %q, %s (%s); want gpu, %q, %s", text, e.Cause.Resource, e.Cause.Detail, e.Confidence,
				e.Cause.Text, want.detail, want.sure)
		}
	}
}
