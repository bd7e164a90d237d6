//go:build linux

package rehearse

import (
	"fmt"
	"io/fs"
	"os"
	"runtime/debug"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/probe"
	"plimsoll/internal/state/engine"
)

// The memory of the program itself, resident on Linux on x86-64: its text takes about 11 MiB and the Go runtime 4
// MiB. Their page tables come on top.
const (
	processBytes      = 16 * ledger.MiB
	processPageTables = 160 * ledger.KiB
)

func hold(d *ledger.Device, component ledger.Component, bytes ledger.Bytes, why string) {
	d.Phases[0].Hold(ledger.Holding{Component: component, Bytes: bytes, Why: why})
}

// PlanArenas returns the host memory of a rank that maps these arenas.
func PlanArenas(number int, arenas []arena.Plan, pages arena.Pages) ledger.Device {
	rank := ledger.HostMemory(number)
	var rounding ledger.Bytes
	for _, a := range arenas {
		hold(&rank, a.Component, a.Size, a.Why)
		rounding += pages.Round(a.Size) - a.Size
	}
	hold(&rank, ledger.PageRounding, rounding,
		fmt.Sprintf("%d arenas, each rounded up to pages of %v (%v)", len(arenas), pages.Size(), pages))
	return rank
}

// PlanProgram returns the host memory of the program itself, and of the page tables for what it maps. One entry of 8
// bytes maps a page. The pages are mapped one by one until the kernel joins them into huge pages, and for good where
// it does not.
func PlanProgram(mapped ledger.Bytes, pages arena.Pages) ledger.Device {
	node := ledger.HostMemory(ledger.WholeNode)
	hold(&node, ledger.PageTables, 8*(mapped/pages.Size())+processPageTables,
		fmt.Sprintf("8 B for each page of %v, and %v for the program", pages.Size(), processPageTables))
	hold(&node, ledger.Process, processBytes, "this program: text, Go runtime, stacks")
	return node
}

// Needed returns the memory of planned devices.
func Needed(planned []ledger.Device) ledger.Bytes {
	var sum ledger.Bytes
	for i := range planned {
		sum += planned[i].Peak().PeakUsed
	}
	return sum
}

// NewVerdict compares a plan with what a host still has. The plan has these arenas, and starts so many threads. It asks
// wouldFit for changes that fit into the memory that is available.
func NewVerdict(
	planned []ledger.Device, h *host.Host, pages arena.Pages, arenas []arena.Plan, threads int,
	wouldFit func(available ledger.Bytes) []string,
) Verdict {
	var pool ledger.Bytes
	if pages == arena.HugetlbPages {
		pool = engine.HugetlbFree(h)
	}
	available, counter := h.Memory.HeadroomWith(pool)
	v := Verdict{Needed: Needed(planned), Available: available, LimitedBy: counter, WouldFit: []string{}}
	v.Fits = counter == "" || v.Needed <= available
	if !v.Fits {
		v.Missing = v.Needed - available
		v.WouldFit = wouldFit(available)
	}
	largest := ledger.Bytes(0)
	for _, a := range arenas {
		largest = max(largest, pages.Round(a.Size))
	}
	v.Shortage = h.Shortage(threads+threadsBeside, largest)
	v.Fits = v.Fits && v.Shortage == ""
	return v
}

// threadsBeside is how many threads the Go runtime may start beside those that work or copy.
const threadsBeside = 16

// MeasureMemory reads this process's memory. It first collects the garbage that earlier readings and the progress
// display left on the Go heap.
func MeasureMemory() (probe.Memory, error) {
	debug.FreeOSMemory()
	return probe.Process(os.DirFS("/"), "self")
}

// arenaPrefix starts the kernel's name of every mapping of an arena.
const arenaPrefix = "/memfd:" + arena.NamePrefix

func isArena(name string) bool { return strings.HasPrefix(name, arenaPrefix) }

// MeasureArenas reads the arenas of a rank. An arena fills its last page from the front, so resident bytes beyond its
// size are rounding.
func MeasureArenas(number int, arenas []arena.Plan, memory probe.Memory) (ledger.Device, error) {
	rank := ledger.HostMemory(number)
	var rounding ledger.Bytes
	for _, a := range arenas {
		name := arenaPrefix + a.Name
		mapping, ok := memory.Mappings[name]
		if !ok {
			return rank, fmt.Errorf("/proc/self/smaps: %w: no mapping is named %s", fs.ErrNotExist, name)
		}
		measured := min(mapping.Proportional, a.Size)
		hold(&rank, a.Component, measured, "")
		rounding += mapping.Proportional - measured
	}
	hold(&rank, ledger.PageRounding, rounding, "")
	return rank, nil
}

// MeasureProgram returns the memory of this process outside of its arenas.
func MeasureProgram(memory probe.Memory) ledger.Device {
	node := ledger.HostMemory(ledger.WholeNode)
	hold(&node, ledger.PageTables, memory.PageTables, "")
	hold(&node, ledger.Process, memory.Proportional(func(name string) bool { return !isArena(name) }), "")
	return node
}

// hugeBytes returns the part of the arenas that is on huge pages.
func hugeBytes(memory probe.Memory) (huge ledger.Bytes) {
	for name, mapping := range memory.Mappings {
		if isArena(name) {
			huge += mapping.Huge
		}
	}
	return huge
}
