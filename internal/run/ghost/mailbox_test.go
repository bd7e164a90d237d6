//go:build linux

package ghost

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/probe"
)

// TestMailbox plays ranks that others wait for once all wait, and refuses what nobody can send.
func TestMailbox(t *testing.T) {
	p, err := newMailbox("first", "last")
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	message := strings.Repeat("ab", 16)
	waits := func(name, text string) {
		path := filepath.Join(p.folder, name+waiting)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	waits("first", `{"rank": 3, "message": "`+message+`", "needed": true}`)
	if all := p.waits(); all != nil {
		t.Errorf("one of two waits: %v", all)
	}
	waits("last", `{"rank": 0, "message": "`+strings.Repeat("c", 32)+`", "needed": false}`)
	if ranks := p.next(p.waits()); !slices.Equal(ranks, []int{3}) {
		t.Errorf("it plays %v", ranks)
	}
	refused := func(message string) string {
		text, _ := os.ReadFile(filepath.Join(p.folder, message+".none"))
		return string(text)
	}
	p.played[3] = errors.New("no such file")
	if ranks := p.next(p.waits()); ranks != nil || refused(strings.Repeat("c", 32)) == "" || refused(message) != "" {
		t.Errorf("it plays %v, and the last goes on as %q", ranks, refused(strings.Repeat("c", 32)))
	}
	p.ended("last")
	if p.next(p.waits()); refused(message) != "it was played, and ended: no such file" {
		t.Errorf("the first was told %q", refused(message))
	}
	p.isFull = true
	waits("first", `{"rank": 4, "message": "`+strings.Repeat("d", 32)+`", "needed": true}`)
	if ranks := p.next(p.waits()); ranks != nil || !strings.Contains(refused(strings.Repeat("d", 32)), "no memory") {
		t.Errorf("it plays %v, and says %q", ranks, refused(strings.Repeat("d", 32)))
	}
	if all := p.waits(); all != nil {
		t.Errorf("all are told, and wait for %v", all)
	}
	waits("first", `{"rank": 3, "message": "../../nowhere", "needed": true}`)
	if all := p.waits(); all != nil {
		t.Errorf("%v is no message", all)
	}
}

// TestRoom leaves room for another program like the largest.
func TestRoom(t *testing.T) {
	b := newBudget(10 * ledger.GiB)
	one, other := &processTree{}, &processTree{}
	if b.exceeds(one, 4*ledger.GiB) || !b.hasRoom() {
		t.Error("two of 4 GiB have no room in 10 GiB")
	}
	if b.exceeds(other, 3*ledger.GiB) || b.hasRoom() {
		t.Error("a third has")
	}
	if b.exceeds(other, 7*ledger.GiB) != true || b.exceeds(one, 4*ledger.GiB) {
		t.Error("not the largest is too much")
	}
	if b.leave(other); b.exceeds(one, 4*ledger.GiB) || !b.hasRoom() {
		t.Error("one that has left counts")
	}
}

// TestClaim ends a process whose parent ended before anybody looked at what it had started, and no other's.
func TestClaim(t *testing.T) {
	orphan := func(scratch string) int {
		command := exec.Command("sh", "-c", "setsid sleep 600 >&- 2>&- & echo $!")
		command.Env = append(os.Environ(), "TRITON_CACHE_DIR="+filepath.Join(scratch, "triton"))
		said, err := command.Output()
		if err != nil {
			t.Fatal(err)
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(said)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
		return pid
	}
	runs := func(pid int) bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err == nil && !strings.Contains(string(stat), ") Z ")
	}
	scratch := t.TempDir()
	mine, other := orphan(scratch), orphan(scratch+"0")
	tree := &processTree{scratch: scratch, members: map[probe.Identity]bool{}}
	tree.end(1 << 30) // the program itself has ended
	if runs(mine) {
		t.Error("its process runs on")
	}
	if !runs(other) {
		t.Error("another program's process was ended")
	}
}
