package service

import (
	"fmt"
	"runtime"
	"sync"

	"plimsoll/engine"
)

// processors is how many threads Go runs at a time, in this process.
var processors struct {
	sync.Mutex
	workers int // of all shards
	without int // as long as there were none
}

// sharing is how many shards use the same workers: those of one rank on the same CPUs.
var sharing = struct {
	sync.Mutex
	shards map[string]int
}{shards: map[string]int{}}

// useWorkers and leaveWorkers count the workers of a shard, once for all shards that share them.
func useWorkers(c engine.ShardConfig) { shareWorkers(c, 1, 1) }

func leaveWorkers(c engine.ShardConfig) { shareWorkers(c, -1, 0) }

// shareWorkers adds shards to those that share workers, which are there from the first one on, or gone with the last.
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

// threadsBeside is how many threads Go needs beside workers, to answer who asks for
// something meanwhile. A collection of garbage would use all it has.
const threadsBeside = 4

// addProcessors has Go run other threads beside that many workers more, or less.
// Workers are in kernels most of the time, where Go cannot stop them: were they all that
// it runs at a time, nothing else would run before they have finished.
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
