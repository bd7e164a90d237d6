//go:build linux

package launch

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
)

// rarestCheck is the longest pause between two looks at a rank. The first look comes
// after a second, and each pause is twice the one before. To find where the memory of a
// large process is, the kernel walks all of its page tables.
const rarestCheck = 5 * time.Minute

// PlacementCheck is where the threads and the memory of a rank's process group were at
// the last look.
type PlacementCheck struct {
	Rank    int `json:"rank"`
	Process int `json:"process"`
	Threads int `json:"threads"`
	// Outside are threads that may run on CPUs that are not the rank's. A thread on
	// fewer CPUs than the rank's has bound itself.
	Outside []Thread `json:"threads_outside"`
	// Memory is anonymous and shared memory by NUMA node.
	Memory map[int]ledger.Bytes `json:"memory_bytes_by_numa_node"`
	// Elsewhere is the part of Memory on other nodes than the memory policy asks for.
	Elsewhere ledger.Bytes `json:"memory_bytes_elsewhere"`
}

// Thread is a thread on the wrong CPUs.
type Thread struct {
	ID   int    `json:"id"`
	Name string `json:"name"`
	CPUs string `json:"cpus"`
}

// checkPlacement looks at the rank, and tells the user of anything wrong that is new.
func (p *process) checkPlacement(logf func(string, ...any)) {
	before, now := p.placement, p.look()
	if now.Threads == 0 || len(now.Memory) == 0 && len(before.Memory) > 0 {
		return // the process is ending
	}
	p.placement = now
	if len(p.placement.Outside) > len(before.Outside) {
		t := p.placement.Outside[0]
		logf("rank %d: the program has bound %d of its %d threads anew, and they may leave CPUs %s: thread %d (%s) "+
			"may run on CPUs %s",
			p.rank.Number, len(p.placement.Outside), p.placement.Threads, p.rank.CPUs, t.ID, t.Name, t.CPUs)
	}
	if p.placement.Elsewhere >= noticedMemory && before.Elsewhere < noticedMemory {
		logf("rank %d: %v of its memory is not on NUMA nodes %s, against policy %s: the nodes were full, or the "+
			"memory was in use before",
			p.rank.Number, p.placement.Elsewhere, cpuset.New(p.rank.NUMANodes...), p.rank.MemoryPolicy)
	}
}

// noticedMemory is the least amount worth telling. Smaller amounts may be a few pages
// that were shared with the launcher.
const noticedMemory = 64 * ledger.MiB

func (p *process) look() PlacementCheck {
	pid := p.command.Process.Pid
	placement := PlacementCheck{Rank: p.rank.Number, Process: pid, Outside: []Thread{}, Memory: map[int]ledger.Bytes{}}
	for _, member := range processes(groupField, pid) {
		folder := fmt.Sprintf("/proc/%d", member)
		threads, _ := filepath.Glob(folder + "/task/*")
		for _, thread := range threads {
			id, err := strconv.Atoi(filepath.Base(thread))
			if err != nil {
				continue
			}
			cpus, err := host.Affinity(id)
			if err != nil {
				continue // the thread or process has ended
			}
			placement.Threads++
			if !cpus.IsSubsetOf(p.rank.CPUs) {
				name, _ := files.ReadKernel(thread + "/comm")
				placement.Outside = append(placement.Outside,
					Thread{id, strings.TrimSpace(string(name)), cpus.String()})
			}
		}
		if maps, err := os.Open(folder + "/numa_maps"); err == nil {
			addMemory(maps, placement.Memory)
			maps.Close()
		}
	}
	if p.rank.MemoryPolicy != binding.PolicyDefault {
		for node, size := range placement.Memory {
			if !slices.Contains(p.rank.NUMANodes, node) {
				placement.Elsewhere += size
			}
		}
	}
	return placement
}

// addMemory adds up the pages of /proc/PID/numa_maps by node, from lines such as
//
//	7f2c4e000000 prefer:0 anon=512 dirty=512 N0=500 N1=12 kernelpagesize_kB=4
//
// It leaves out pages of files, which other processes may have read.
func addMemory(r io.Reader, memory map[int]ledger.Bytes) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		own := false
		pages, size := map[int]int64{}, int64(0)
		for _, field := range strings.Fields(lines.Text()) {
			key, value, _ := strings.Cut(field, "=")
			number, err := strconv.ParseInt(value, 10, 64)
			node, nodeErr := strconv.Atoi(strings.TrimPrefix(key, "N"))
			switch {
			case key == "anon", strings.HasPrefix(field, `file=/memfd:`), strings.HasPrefix(field, `file=/dev/shm/`):
				own = true
			case err != nil:
			case key == "kernelpagesize_kB":
				size = number << 10
			case strings.HasPrefix(key, "N") && nodeErr == nil:
				pages[node] = number
			}
		}
		if own {
			for node, number := range pages {
				memory[node] += ledger.Bytes(number * size)
			}
		}
	}
}
