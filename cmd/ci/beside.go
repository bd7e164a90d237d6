package main

import (
	"bytes"
	"context"
	"io"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
)

// sideBySide makes parts in their order. One begins as soon as the cores that it keeps busy are free. Once one has
// failed, none begins; those that run come to their end. The error is that of the first that failed.
func sideBySide(parts []part, cores int, make func(part) error) error {
	free := semaphore.NewWeighted(int64(cores))
	running, failed := errgroup.WithContext(context.Background())
	for _, p := range parts {
		busy := int64(cores)
		if p.Cores > 0 {
			busy = int64(min(p.Cores, cores))
		}
		if free.Acquire(failed, busy) != nil || failed.Err() != nil {
			break
		}
		running.Go(func() error {
			defer free.Release(busy)
			return make(p)
		})
	}
	return running.Wait()
}

// prefixed writes whole lines to out, each behind the prefix, so that the lines of parts that run side by side can be
// told apart.
type prefixed struct {
	prefix string
	out    io.Writer
	turn   *sync.Mutex // held while a line is written
	begun  []byte      // a line that has no end yet
}

func (p *prefixed) Write(text []byte) (int, error) {
	p.begun = append(p.begun, text...)
	end := bytes.LastIndexByte(p.begun, '\n') + 1
	var lines []byte
	for line := range bytes.Lines(p.begun[:end]) {
		lines = append(append(lines, p.prefix...), line...)
	}
	p.begun = append(p.begun[:0], p.begun[end:]...)
	p.turn.Lock()
	defer p.turn.Unlock()
	if _, err := p.out.Write(lines); err != nil {
		return 0, err
	}
	return len(text), nil
}

// end ends a line that has no end.
func (p *prefixed) end() {
	if len(p.begun) > 0 {
		io.WriteString(p, "\n")
	}
}
