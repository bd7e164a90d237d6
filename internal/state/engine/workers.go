package engine

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
)

// Workers are OS threads, each bound to one CPU for life. The shards of one rank with
// the same CPUs share their workers, which make the passes of the shards one after
// the other. A program may have an optimizer for each parameter, and a core needs one
// thread for all of them. Ranks share no workers, as one rank may wait for another.
type Workers struct {
	crew    *crew
	running sync.WaitGroup
}

// crew is the threads of one rank on one list of CPUs, for all shards that use it.
type crew struct {
	name  string
	users int // guarded by crews
	tasks []chan task
	ended sync.WaitGroup
}

// task is a worker's part of a pass.
type task struct {
	run  func(worker int)
	done *sync.WaitGroup
}

// Unbound is the CPU of a worker that is bound to none, nor to a thread. A simulation has such workers: a thread for
// each of millions would cost more than all that they do.
const Unbound = -1

// waitingTasks is how many passes can wait for a worker before their callers do.
const waitingTasks = 64

var crews = struct {
	sync.Mutex
	byName map[string]*crew
}{byName: map[string]*crew{}}

// NewWorkers returns when the rank has a worker on each of the CPUs and each worker
// has checked its binding.
func NewWorkers(rank int, cpus []int) (*Workers, error) {
	if len(cpus) == 0 {
		return nil, errors.New("workers need at least one CPU")
	}
	crews.Lock()
	defer crews.Unlock()
	name := fmt.Sprint(rank, cpus)
	c := crews.byName[name]
	if c == nil {
		var err error
		if c, err = newCrew(name, cpus); err != nil {
			return nil, err
		}
		crews.byName[name] = c
	}
	c.users++
	return &Workers{crew: c}, nil
}

func newCrew(name string, cpus []int) (*crew, error) {
	c := &crew{name: name}
	bound := make(chan error, len(cpus))
	for worker, cpu := range cpus {
		tasks := make(chan task, waitingTasks)
		c.tasks = append(c.tasks, tasks)
		c.ended.Go(func() {
			bound <- bindWorker(cpu)
			for t := range tasks {
				t.run(worker)
				t.done.Done()
			}
		})
	}
	var err error
	for range cpus {
		err = errors.Join(err, <-bound)
	}
	if err != nil {
		c.end()
		return nil, err
	}
	return c, nil
}

// bindWorker binds the calling goroutine to a thread of its own, and that to a CPU. The thread is never unlocked: it
// ends with the goroutine, and no other goroutine inherits its binding.
func bindWorker(cpu int) error {
	if cpu == Unbound {
		return nil
	}
	runtime.LockOSThread()
	return bindThread(cpu)
}

func (c *crew) end() {
	for _, tasks := range c.tasks {
		close(tasks)
	}
	c.ended.Wait()
}

// ErrBinding says that a worker cannot be bound to its CPU.
var ErrBinding = errors.New("binding a worker")

// Count returns the number of workers.
func (w *Workers) Count() int { return len(w.crew.tasks) }

// Start hands a task to every worker and returns at once.
func (w *Workers) Start(run func(worker int)) {
	w.running.Add(len(w.crew.tasks))
	for _, tasks := range w.crew.tasks {
		tasks <- task{run, &w.running}
	}
}

// StartOne hands a task to one worker and returns at once.
func (w *Workers) StartOne(worker int, run func(worker int)) {
	w.running.Add(1)
	w.crew.tasks[worker] <- task{run, &w.running}
}

// Wait returns when every worker has finished the tasks of Start and StartOne.
func (w *Workers) Wait() { w.running.Wait() }

// Close waits for the tasks of Start. It ends the workers if no other shard uses them.
func (w *Workers) Close() {
	w.Wait()
	crews.Lock()
	defer crews.Unlock()
	if w.crew.users--; w.crew.users == 0 {
		delete(crews.byName, w.crew.name)
		w.crew.end()
	}
}
