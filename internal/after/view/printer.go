//go:build linux

package view

import (
	"io"
	"sync"
	"time"

	"plimsoll/internal/base/samples"
)

// PlainWidth is the width of what a Printer prints.
const PlainWidth = 80

// Printer prints a state, again and again, where there is no terminal to draw on. Its methods may be called by any
// goroutine.
type Printer struct {
	to      io.Writer
	closing chan struct{}
	closed  chan struct{}

	lock    sync.Mutex
	state   State
	changed bool
}

// Print prints the state each interval.
func Print(to io.Writer, interval time.Duration) *Printer {
	p := &Printer{to: to, closing: make(chan struct{}), closed: make(chan struct{})}
	go func() {
		defer close(p.closed)
		ticker := time.NewTicker(interval)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				p.print()
			case <-p.closing:
				p.print()
				return
			}
		}
	}()
	return p
}

// Add takes the next record. It never waits for the output.
func (p *Printer) Add(r *samples.Record) {
	p.lock.Lock()
	defer p.lock.Unlock()
	p.state.Add(r)
	p.changed = p.changed || r.Sample != nil || r.End != nil
}

// Close prints the last state.
func (p *Printer) Close() {
	close(p.closing)
	<-p.closed
}

func (p *Printer) print() {
	p.lock.Lock()
	text, changed := "", p.changed
	if changed {
		text = p.state.Text(PlainWidth) + "\n"
	}
	p.changed = false
	p.lock.Unlock()
	_, _ = io.WriteString(p.to, text) // a reader that has gone needs no more
}
