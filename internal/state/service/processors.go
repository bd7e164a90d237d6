//go:build linux

package service

import (
	"fmt"
	"runtime"
	"sync"

	"plimsoll/internal/state/engine"
)

// processors counts the workers of all shards, to set how many threads Go runs at a
// time.
var processors struct {
	sync.Mutex
	workers int // all workers of all shards, and what their lanes need
	without int // GOMAXPROCS without workers
}

// sharing counts the shards that use the same workers: shards of one rank on the same
// CPUs.
var sharing = struct {
	sync.Mutex
	shards map[string]int
}{shards: map[string]int{}}

// useWorkers counts the workers of a shard, and the lanes of its tier. Shards that share workers count them once.
func useWorkers(c engine.ShardConfig) {
	shareWorkers(c, 1, 1)
	if lanes := c.LaneProcessors(); lanes > 0 {
		addProcessors(lanes)
	}
}

// leaveWorkers undoes useWorkers.
func leaveWorkers(c engine.ShardConfig) {
	if lanes := c.LaneProcessors(); lanes > 0 {
		addProcessors(-lanes)
	}
	shareWorkers(c, -1, 0)
}

// shareWorkers adds to the number of shards that share workers. The workers count from
// the first such shard on until the last one is gone.
func shareWorkers(c engine.ShardConfig, shards, turning int) {
	sharing.Lock()
	defer sharing.Unlock()
	name := fmt.Sprint(c.Rank, c.CPUs)
	sharing.shards[name] += shards
	if sharing.shards[name] != turning {
		return
	}
	if turning == 0 {
		delete(sharing.shards, name)
	}
	addProcessors(shards * len(c.CPUs))
}

// threadsBeside is how many threads Go needs beside the workers, to answer other
// requests meanwhile. It is small: garbage collection would use all of them.
const threadsBeside = 4

// addProcessors raises GOMAXPROCS with the number of workers, or lowers it. Go cannot
// preempt workers in kernels, where they spend most of their time. If workers occupied
// all of GOMAXPROCS, nothing else would run until they finish.
func addProcessors(workers int) {
	p := &processors
	p.Lock()
	defer p.Unlock()
	if p.workers == 0 {
		p.without = runtime.GOMAXPROCS(0)
	}
	p.workers += workers
	runtime.GOMAXPROCS(max(p.without, p.workers+min(p.without, threadsBeside)))
}
