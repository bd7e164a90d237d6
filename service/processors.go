package service

import (
	"runtime"
	"sync"
)

// processors is how many threads Go runs at a time, in this process.
var processors struct {
	sync.Mutex
	workers int // of all shards
	without int // as long as there were none
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
