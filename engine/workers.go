package engine

import (
	"errors"
	"fmt"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// Workers are OS threads, each bound to one CPU for life.
type Workers struct {
	tasks   []chan func(worker int)
	running sync.WaitGroup
	ended   sync.WaitGroup
}

// NewWorkers starts a worker on each of the CPUs and returns when each is where
// it should be.
func NewWorkers(cpus []int) (*Workers, error) {
	if len(cpus) == 0 {
		return nil, errors.New("workers need at least one CPU")
	}
	w := &Workers{}
	bound := make(chan error, len(cpus))
	for worker, cpu := range cpus {
		tasks := make(chan func(int), 1)
		w.tasks = append(w.tasks, tasks)
		w.ended.Go(func() {
			// The thread is never unlocked, so that it ends with the goroutine
			// and no other goroutine inherits its binding.
			runtime.LockOSThread()
			bound <- bindThread(cpu)
			for task := range tasks {
				task(worker)
				w.running.Done()
			}
		})
	}
	var err error
	for range cpus {
		err = errors.Join(err, <-bound)
	}
	if err != nil {
		w.Close()
		return nil, err
	}
	return w, nil
}

// ErrBinding says that a worker cannot be on the CPU that is meant for it.
var ErrBinding = errors.New("binding a worker")

// bindThread binds the calling thread to one CPU and reads the binding back.
func bindThread(cpu int) error {
	set := unix.NewCPUSet(cpu + 1)
	set.Set(cpu)
	if err := unix.SchedSetaffinityDynamic(0, set); err != nil {
		return fmt.Errorf("%w to CPU %d: %w", ErrBinding, cpu, err)
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

// Count is the number of workers.
func (w *Workers) Count() int { return len(w.tasks) }

// Start hands a task to every worker and returns at once.
func (w *Workers) Start(task func(worker int)) {
	w.running.Add(len(w.tasks))
	for _, tasks := range w.tasks {
		tasks <- task
	}
}

// Wait returns when every worker has finished what Start gave it.
func (w *Workers) Wait() { w.running.Wait() }

// Close ends the workers.
func (w *Workers) Close() {
	for _, tasks := range w.tasks {
		close(tasks)
	}
	w.ended.Wait()
}
