//go:build linux

package service

import (
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"
)

// events wake those who wait for a condition whenever something has happened, so that no test looks again and again.
type events struct {
	mu    sync.Mutex
	count int64         // of what has happened
	next  chan struct{} // closed when something happens; nil if nobody waits
}

func (e *events) tell() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.count++
	if e.next != nil {
		close(e.next)
		e.next = nil
	}
}

// soFar returns how often something has happened, and a channel that is closed when it happens again.
func (e *events) soFar() (count int64, next <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.next == nil {
		e.next = make(chan struct{})
	}
	return e.count, e.next
}

// await waits until a condition holds. It looks after each event.
func (e *events) await(t *testing.T, what string, so func() bool) {
	t.Helper()
	const patience = 2 * time.Minute // much longer than needed, even on busy CPUs
	for limit := time.After(patience); ; {
		_, next := e.soFar()
		if so() {
			return
		}
		select {
		case <-next:
		case <-limit:
			t.Fatalf("waited %v for %s", patience, what)
		}
	}
}

// awaitMore waits for a number of events.
func (e *events) awaitMore(t *testing.T, what string, more int64) {
	t.Helper()
	before, _ := e.soFar()
	e.await(t, what, func() bool { now, _ := e.soFar(); return now >= before+more })
}

// tellDescriptor is where a process of startTeller writes a byte for each event.
const tellDescriptor = 3

// teller is a process that tells of events.
type teller struct {
	events
	command *exec.Cmd
	reads   sync.WaitGroup
}

// startTeller starts this test's program as something else, with an environment variable that says what.
func startTeller(t *testing.T, variable string) *teller {
	t.Helper()
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	p := &teller{command: exec.Command(os.Args[0])}
	p.command.Env = append(os.Environ(), variable)
	p.command.Stderr = os.Stderr
	p.command.ExtraFiles = []*os.File{in}
	if err := p.command.Start(); err != nil {
		t.Fatal(err)
	}
	p.reads.Go(func() {
		defer out.Close()
		for one := make([]byte, 1); ; p.tell() {
			if _, err := out.Read(one); err != nil {
				return // the process has ended
			}
		}
	})
	return p
}

// kill kills the process, which must not have ended by itself.
func (p *teller) kill(t *testing.T) {
	t.Helper()
	if err := p.command.Process.Kill(); err != nil {
		t.Fatalf("the trainer ended by itself: %v", err)
	}
	err := p.command.Wait()
	if status, ok := p.command.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		t.Fatalf("the trainer was not killed: %v", err)
	}
	p.reads.Wait()
}

// await waits until a condition holds that nobody tells of.
func await(t *testing.T, what string, so func() bool) {
	t.Helper()
	const patience = time.Minute // much longer than needed, even on busy CPUs
	for deadline := time.Now().Add(patience); !so(); time.Sleep(50 * time.Microsecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %v for %s", patience, what)
		}
	}
}
