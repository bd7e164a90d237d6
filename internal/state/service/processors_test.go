//go:build linux

package service

import (
	"bytes"
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync"
	"testing"

	"plimsoll/internal/state/service/protocol"
)

// TestGoRunsBesideWorkers checks that Go has threads for the rest of the service while
// workers are in kernels, and its former number when they are gone.
func TestGoRunsBesideWorkers(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	check := func(workers int) {
		t.Helper()
		if now := runtime.GOMAXPROCS(0); now != max(before, workers+min(before, threadsBeside)) {
			t.Errorf("Go runs %d threads at a time with %d workers, and %d without", now, workers, before)
		}
	}
	for _, each := range []int{1, before, 3 * before} {
		var group sync.WaitGroup
		for range 3 { // concurrently, as the ranks of a host open theirs
			group.Go(func() { addProcessors(each) })
		}
		group.Wait()
		check(3 * each)
		for range 3 {
			group.Go(func() { addProcessors(-each) })
		}
		group.Wait()
		if now := runtime.GOMAXPROCS(0); now != before {
			t.Errorf("Go runs %d threads at a time after the workers, and %d before", now, before)
		}
	}
}

// TestSessionsLeaveGoItsThreads checks the same over the lives of sessions.
func TestSessionsLeaveGoItsThreads(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	t.Run("service", func(t *testing.T) {
		_, socket := serveHere(t)
		workers := 0
		for i, part := range []string{"a", "b", "c"} {
			// The first two belong to one rank, and share its workers.
			s := mustOpen(t, socket, testDocument(func(d *protocol.Document) {
				d.World, d.Rank, d.Part, d.CPUs = 2, i/2, part, []int{0, 0}
			}))
			workers = 2 * (1 + i/2)
			if now := runtime.GOMAXPROCS(0); now != max(before, workers+min(before, threadsBeside)) {
				t.Errorf("Go runs %d threads at a time with %d workers, and %d without", now, workers, before)
			}
			if part == "a" {
				defer s.Close() // the service ends the other one itself
			}
		}
	})
	if now := runtime.GOMAXPROCS(0); now != before {
		t.Errorf("Go runs %d threads at a time after the service, and %d before", now, before)
	}
}

// TestCPUIsTakenAway restarts a killed service that may no longer use the CPU of a
// session's worker. Keeping the state matters more than the binding of the workers.
func TestCPUIsTakenAway(t *testing.T) {
	r := startService(t)
	document := testDocument(small)
	cpu := r.cpus(t)[0]
	document.CPUs = []int{cpu, cpu, cpu, cpu}
	s := begun(t, r.Socket, document)
	mustStep(t, s, 2)
	want := fingerprint(t, s)
	if err := s.Detach(); err != nil {
		t.Fatal(err)
	}
	text := func(cpus []int) []byte {
		return fmt.Appendf(nil, `"cpus":%s`, strings.ReplaceAll(fmt.Sprint(cpus), " ", ","))
	}
	header := memfds(t, r.Process())["rank0/bf16/session"]
	content, err := io.ReadAll(header)
	if err != nil {
		t.Fatal(err)
	}
	had, none := text(document.CPUs), text([]int{protocol.MaximumCPUs - 1}) // no host has that CPU
	none = append(none, bytes.Repeat([]byte(" "), len(had)-len(none))...)
	copy(content[bytes.Index(content, had):], none)
	fields := fieldsOf(content)
	fields.checksum = fields.checksumWith(content[headerFieldsSize : headerFieldsSize+int(fields.document)])
	if _, err := header.WriteAt(content, 0); err != nil {
		t.Fatal(err)
	}
	r.Kill()
	s = mustOpen(t, r.Socket, document)
	if got := fingerprint(t, s); got != want || s.Welcome.Step != 2 {
		t.Errorf("at step %d the state is %s, want %s", s.Welcome.Step, got, want)
	}
	if said := r.log.String(); !strings.Contains(said, fmt.Sprintf("session rank0/bf16: binding a worker to CPU %d: "+
		"invalid argument; its workers", protocol.MaximumCPUs-1)) {
		t.Errorf("the service has said %q", said)
	}
	mustStep(t, s, 4)
	if err := s.Detach(); err != nil {
		t.Fatal(err)
	}
}
