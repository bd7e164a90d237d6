package engine

import (
	"errors"
	"fmt"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// Group is a group of workers: OS threads, each bound to one CPU for life.
type Group struct {
	tasks   []chan func(worker int)
	running sync.WaitGroup
	ended   sync.WaitGroup
}

// NewGroup starts a worker on each of the CPUs and returns when each is where
// it should be.
func NewGroup(cpus []int) (*Group, error) {
	if len(cpus) == 0 {
		return nil, errors.New("a worker group needs at least one CPU")
	}
	g := &Group{}
	bound := make(chan error, len(cpus))
	for worker, cpu := range cpus {
		tasks := make(chan func(int), 1)
		g.tasks = append(g.tasks, tasks)
		g.ended.Go(func() {
			// The thread is never unlocked, so that it ends with the goroutine
			// and no other goroutine inherits its binding.
			runtime.LockOSThread()
			bound <- bindThread(cpu)
			for task := range tasks {
				task(worker)
				g.running.Done()
			}
		})
	}
	var err error
	for range cpus {
		err = errors.Join(err, <-bound)
	}
	if err != nil {
		g.Close()
		return nil, err
	}
	return g, nil
}

// bindThread binds the calling thread to one CPU and reads the binding back.
func bindThread(cpu int) error {
	set := unix.NewCPUSet(cpu + 1)
	set.Set(cpu)
	if err := unix.SchedSetaffinityDynamic(0, set); err != nil {
		return fmt.Errorf("binding a worker to CPU %d: %w", cpu, err)
	}
	now := unix.NewCPUSet(max(cpu+1, 8192))
	if err := unix.SchedGetaffinityDynamic(0, now); err != nil {
		return fmt.Errorf("reading the binding of a worker back: %w", err)
	}
	if now.Count() != 1 || !now.IsSet(cpu) {
		return fmt.Errorf("a worker was bound to CPU %d and finds itself on %d CPUs", cpu, now.Count())
	}
	return nil
}

// Workers is the number of workers.
func (g *Group) Workers() int { return len(g.tasks) }

// Start hands a task to every worker and returns at once.
func (g *Group) Start(task func(worker int)) {
	g.running.Add(len(g.tasks))
	for _, tasks := range g.tasks {
		tasks <- task
	}
}

// Wait returns when every worker has finished what Start gave it.
func (g *Group) Wait() { g.running.Wait() }

// Close ends the workers.
func (g *Group) Close() {
	for _, tasks := range g.tasks {
		close(tasks)
	}
	g.ended.Wait()
}
