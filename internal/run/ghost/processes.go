//go:build linux

package ghost

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/probe"
)

// processTree is the processes of a program: the one that was started, and all that it has started, in whatever
// session. The first one adopts those whose parents have ended.
type processTree struct {
	scratch string // the folder that only this program's processes have in their environment

	mutex   sync.Mutex
	members map[probe.Identity]bool
}

// look finds new processes, and returns those that run.
func (t *processTree) look(root int) []probe.Identity {
	all, err := probe.Processes()
	if err != nil {
		return nil
	}
	return t.find(root, all)
}

func (t *processTree) find(root int, all []probe.Running) []probe.Identity {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	slices.SortFunc(all, func(a, b probe.Running) int { return cmp.Compare(a.StartTime, b.StartTime) })
	var running []probe.Identity
	known := map[int]bool{root: true}
	for found := true; found; { // a child may have a smaller number than its parent, and the same time
		found = false
		for _, p := range all {
			isMember := p.PID == root || known[p.Parent] || t.members[p.Identity]
			if isMember && !slices.Contains(running, p.Identity) {
				running = append(running, p.Identity)
				t.members[p.Identity], known[p.PID], found = true, true, true
			}
		}
	}
	return running
}

// claim finds processes whose parents ended before anybody looked. They have the program's environment, in which the
// caches of libraries are in the scratch folder.
func (t *processTree) claim() {
	all, err := probe.Processes()
	if err != nil {
		return
	}
	t.mutex.Lock()
	defer t.mutex.Unlock()
	for _, p := range all {
		environment, _ := files.ReadKernel(fmt.Sprintf("/proc/%d/environ", p.PID)) // not of other users
		if strings.Contains(string(environment), t.scratch+string(os.PathSeparator)) {
			t.members[p.Identity] = true
		}
	}
}

// lastsAfterKill bounds the wait for a killed process. One in a call that nothing interrupts, as to a disk that does
// not answer, would be waited for without end.
const lastsAfterKill = 10 * time.Second

// end ends all processes, and returns when they have ended: until then they hold memory and files. They are stopped
// first, so that none starts another one unseen.
func (t *processTree) end(root int) {
	t.claim()
	stopped := map[probe.Identity]bool{}
	for more := true; more; {
		more = false
		for _, p := range t.look(root) {
			if !stopped[p] {
				_ = syscall.Kill(p.PID, syscall.SIGSTOP)
				stopped[p], more = true, true
			}
		}
	}
	for p := range stopped {
		_ = syscall.Kill(p.PID, syscall.SIGKILL)
	}
	deadline := time.Now().Add(lastsAfterKill)
	for p := range stopped {
		for p.IsRunning() && time.Now().Before(deadline) {
			time.Sleep(time.Millisecond)
		}
	}
}

// budget is the memory of this host that all programs of a command may take together.
type budget struct {
	limit ledger.Bytes // 0 is none
	from  string       // why it is as much

	mutex sync.Mutex
	taken map[*processTree]ledger.Bytes
}

// spared is the part of this host's free memory that programs leave to others.
const spared = 0.1

// newBudget returns the budget of a command: what the user says, or most of what this host has left.
func newBudget(limit ledger.Bytes) *budget {
	b := &budget{limit: limit, from: "--program-memory", taken: map[*processTree]ledger.Bytes{}}
	if limit > 0 {
		return b
	}
	if here, err := host.Local(); err == nil {
		free, name := here.Memory.Headroom()
		b.limit, b.from = free-ledger.Bytes(spared*float64(free)), "90 % of what was left: "+name
	}
	return b
}

// exceeds notes what a program has taken, and says whether all have taken too much, and this one most.
func (b *budget) exceeds(t *processTree, bytes ledger.Bytes) bool {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	b.taken[t] = bytes
	var sum ledger.Bytes
	for _, taken := range b.taken {
		sum += taken
		if taken > bytes {
			return false
		}
	}
	return b.limit > 0 && sum > b.limit
}

// hasRoom reports whether another program like those that run would stay within the limit.
func (b *budget) hasRoom() bool {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	var sum, most ledger.Bytes
	for _, taken := range b.taken {
		sum, most = sum+taken, max(most, taken)
	}
	return b.limit <= 0 || sum+most <= b.limit
}

func (b *budget) leave(t *processTree) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	delete(b.taken, t)
}

// guard watches a program until it has taken too much or done is closed. It returns why it must end, or nil.
func (b *budget) guard(t *processTree, root int, scratch string, done <-chan struct{}) error {
	defer b.leave(t)
	var members []probe.Identity
	var looked time.Time
	var pause time.Duration
	for {
		if begin := time.Now(); begin.Sub(looked) > pause {
			members = t.look(root)
			looked = time.Now()
			pause = max(100*time.Millisecond, 20*looked.Sub(begin)) // hosts may have many processes
		}
		if b.exceeds(t, sum(members, quickly)) {
			if taken := sum(members, exactly); b.exceeds(t, taken) {
				return b.refusal(members, taken, scratch)
			}
		}
		select {
		case <-done:
			return nil
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func sum(members []probe.Identity, of func(pid int) ledger.Bytes) (bytes ledger.Bytes) {
	for _, p := range members {
		bytes += of(p.PID)
	}
	return bytes
}

// quickly returns the memory of a process that is no file's. What it shares with others is counted in full.
func quickly(pid int) ledger.Bytes { return fields(pid, "status", "RssAnon:", "RssShmem:") }

// exactly returns its part of that.
func exactly(pid int) ledger.Bytes {
	if bytes := fields(pid, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:"); bytes > 0 {
		return bytes
	}
	return quickly(pid) // the kernel is older than 5.9
}

func fields(pid int, file string, names ...string) (bytes ledger.Bytes) {
	text, err := files.ReadKernel(filepath.Join("/proc", strconv.Itoa(pid), file))
	if err != nil {
		return 0
	}
	found := host.ParseFields(string(text))
	for _, name := range names {
		bytes += ledger.Bytes(found[strings.TrimSuffix(name, ":")])
	}
	return bytes
}

// refusal says what took the memory.
func (b *budget) refusal(members []probe.Identity, taken ledger.Bytes, scratch string) error {
	largest := slices.MaxFunc(members, func(a, b probe.Identity) int {
		return cmp.Compare(exactly(a.PID), exactly(b.PID))
	})
	of := ""
	if len(members) > 1 {
		of = fmt.Sprintf(" in %d processes", len(members))
	}
	at := ""
	if place := placeOf(largest.PID, scratch); place != "" {
		at = ", in " + place
	}
	return fault.Inputf("the program took %v of this host's memory%s%s: more than the %v that it may take (%s)", taken,
		of, at, b.limit, b.from).WithHint("numbers that the program itself makes or reads take memory here: give it " +
		"fewer of them, or --program-memory more")
}

// placeOf asks a process where it is, in its own code. It returns "" where it does not answer.
func placeOf(pid int, scratch string) string {
	status, err := files.ReadKernel(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil || !catches(string(status), syscall.SIGUSR2) || syscall.Kill(pid, syscall.SIGUSR2) != nil {
		return ""
	}
	for range 20 {
		time.Sleep(10 * time.Millisecond)
		said, _ := filepath.Glob(filepath.Join(scratch, "where-*"))
		for _, path := range said {
			if text, err := files.Read(path, 1<<20); err == nil && len(text) > 0 {
				return firstPlace(string(text), scratch)
			}
		}
	}
	return ""
}

// catches reports whether a process has a handler of a signal.
func catches(status string, signal syscall.Signal) bool {
	_, after, _ := strings.Cut(status, "SigCgt:")
	mask, err := strconv.ParseUint(strings.TrimSpace(strings.SplitN(after, "\n", 2)[0]), 16, 64)
	return err == nil && mask>>(signal-1)&1 == 1
}

var frame = regexp.MustCompile(`File "([^"]+)", line (\d+) in (.+)`)

// firstPlace returns the innermost line of a stack that is the program's own, or the innermost one.
func firstPlace(stack, scratch string) string {
	first := ""
	for _, found := range frame.FindAllStringSubmatch(stack, -1) {
		file := found[1]
		if strings.HasPrefix(file, scratch) || strings.HasPrefix(file, "<") {
			continue
		}
		place := fmt.Sprintf("%s:%s %s", file, found[2], found[3])
		if !strings.Contains(file, "-packages"+string(os.PathSeparator)) && !strings.Contains(file, "/lib/python3") {
			return place
		}
		first = cmp.Or(first, place)
	}
	return first
}
